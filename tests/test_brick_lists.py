"""The walk over listed query tiles, compiled for the host and run on the CPU, against the mask itself."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import list_wrappers  # noqa: E402
from bricks_on_host import call, ints  # noqa: E402
from fa3.backward_plan import BackwardTiles, make_backward_specs  # noqa: E402
from fa3.backward_spec import BackwardSpec  # noqa: E402
from fa3.key_lists import make_key_lists  # noqa: E402
from fa3.mods import BLOCK, CUT, EMPTY, WHOLE  # noqa: E402
from test_key_lists import mask_of  # noqa: E402

MODS = {"mask_mod": "fa3.kernels.mods:document_causal", "mask_aux": "i2"}

#: (batch, heads of tiles, query heads of each), (batch and query heads of the mask).
SHARING = [
    ((2, 2, 3), (2, 6)),
    ((2, 2, 3), (1, 1)),
    ((2, 2, 3), (2, 1)),
    ((2, 3, 1), (1, 3)),
    ((1, 1, 9), (1, 9)),
]


def spec_of(tile_m: int, tile_n: int) -> BackwardSpec:
    tiles = BackwardTiles(tile_m, tile_n, 2, 1, 1, "")
    return make_backward_specs("bf16", (64, 64), "blocks", tiles, deterministic=True, **MODS)[1]


def kinds_by_chance(draw: random.Random, *shape: int) -> Tensor:
    """What a mask does to blocks; some heads see nothing at all, and some block of keys is seen by nobody."""
    size = torch.Size(shape).numel()
    kinds = torch.tensor(draw.choices((EMPTY, EMPTY, CUT, WHOLE), k=size)).view(shape)
    kinds[..., draw.randrange(shape[3])] = EMPTY
    for b, h in itertools.product(*map(range, shape[:2])):
        if draw.random() < 0.3:
            kinds[b, h] = EMPTY
    return kinds


@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize(("sizes", "of_mask"), SHARING, ids=str)
@pytest.mark.parametrize("lengths", [(300, 500), (512, 200), (1, 129)], ids=str)
def test_a_tile_of_keys_meets_each_query_tile_that_sees_it_once_head_after_head(tile, sizes, of_mask, lengths):
    batch, heads, group = sizes
    tile_m, tile_n = tile
    draw = random.Random(repr((tile, sizes, of_mask, lengths)))
    kinds = kinds_by_chance(draw, *of_mask, *(-(-length // BLOCK) for length in lengths))
    lists = make_key_lists(mask_of(kinds, *lengths), *tile)
    m_blocks, n_blocks, key_blocks = -(-lengths[0] // tile_m), -(-lengths[1] // tile_n), kinds.shape[3]
    strides = (of_mask[1] * key_blocks if of_mask[0] > 1 else 0, key_blocks if of_mask[1] > 1 else 0)
    steps, places = ints(batch, heads, n_blocks), ints(batch, heads, n_blocks, m_blocks * group, 4)
    call(
        list_wrappers.walk,
        *(lists.counts, lists.indices, lists.turns, steps, places, *sizes, *lengths, *strides),
        constants=(spec_of(*tile),),
    )
    kinds = kinds.expand(batch, heads * group, -1, -1)
    untouched = [ints(4).tolist()]
    turns: dict[tuple[int, int, int], list[int]] = {}
    # Tiles of keys add to dQ from the last to the first.
    for b, h, n in itertools.product(range(batch), range(heads), reversed(range(n_blocks))):
        expected = []
        for head in range(h * group, (h + 1) * group):
            seen = [(m, kinds[b, head, m * tile_m // BLOCK, n * tile_n // BLOCK].item()) for m in range(m_blocks)]
            expected += [[m, head, 1] for m, kind in reversed(seen) if kind == CUT]
            expected += [[m, head, 0] for m, kind in reversed(seen) if kind == WHOLE]
        found = places[b, h, n].tolist()
        assert steps[b, h, n] == len(expected)
        assert [place[:3] for place in found[: len(expected)]] == expected
        assert found[len(expected) :] == untouched * (len(found) - len(expected))
        for m, head, _, turn in found[: len(expected)]:
            turns.setdefault((b, head, m), []).append(turn)
    for order in turns.values():
        assert order == list(range(len(order)))
