"""The query tiles that see each block of keys: the lists of a block mask the other way round."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa3 import key_lists as module
from fa3.key_lists import KeyLists, key_lists, make_key_lists
from fa3.mods import BLOCK, CUT, EMPTY, WHOLE, BlockMask, MaskMod, ordered_blocks

TILES = ((64, 64), (64, 128), (128, 64), (128, 128))


def keep(batch, head, q_index, kv_index):
    return q_index == q_index


def mask_of(kinds: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
    return BlockMask(MaskMod("listed:keep", keep), seqlen_q, seqlen_k, *ordered_blocks(kinds))


@st.composite
def block_masks(draw) -> BlockMask:
    """Blocks that are cut, whole or empty by chance; what follows the visited ones is no block."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lengths = draw(st.integers(1, 5 * BLOCK)), draw(st.integers(1, 5 * BLOCK))
    blocks = [-(-length // BLOCK) for length in lengths]
    kind = st.sampled_from([EMPTY, CUT, WHOLE])
    size = batch * heads * blocks[0] * blocks[1]
    kinds = torch.tensor(draw(st.lists(kind, min_size=size, max_size=size))).view(batch, heads, *blocks)
    mask = mask_of(kinds, *lengths)
    visited = torch.arange(blocks[1]) < mask.counts.sum(-1, keepdim=True)
    mask.indices[~visited] = 10**6
    assert torch.equal(mask.kinds(), kinds.to(torch.int8))
    return mask


def listed(lists: KeyLists, *place: int) -> list[tuple[int, int, int]]:
    """(query tile, kind, turn) of every entry, in order."""
    cut, whole = lists.counts[place].tolist()
    kinds = [CUT] * cut + [WHOLE] * whole
    visited = slice(0, cut + whole)
    return list(zip(lists.indices[place][visited].tolist(), kinds, lists.turns[place][visited].tolist(), strict=True))


@settings(max_examples=80, deadline=None)
@given(block_masks(), st.sampled_from(TILES))
def test_every_query_tile_that_sees_a_block_of_keys_is_listed_once(mask, tile):
    tile_m, tile_n = tile
    lists = make_key_lists(mask, *tile)
    kinds = mask.kinds()
    batch, heads, _, key_blocks = kinds.shape
    query_tiles, key_tiles = -(-mask.seqlen_q // tile_m), -(-mask.seqlen_k // tile_n)
    assert lists.counts.shape == (batch, heads, key_blocks, 2)
    assert lists.indices.shape == lists.turns.shape == (batch, heads, key_blocks, query_tiles)
    for x in lists:
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    for b, h, n in itertools.product(range(batch), range(heads), range(key_blocks)):
        tiles = range(query_tiles)
        expected = [(m, kinds[b, h, m * tile_m // BLOCK, n].item()) for m in reversed(tiles)]
        entries = listed(lists, b, h, n)
        assert [entry[:2] for entry in entries] == [(m, k) for kind in (CUT, WHOLE) for m, k in expected if k == kind]
        # Something that can be read even where nothing is listed.
        assert sorted(lists.indices[b, h, n].tolist()) == list(tiles)
    # The turns of a query tile: each tile of keys that visits it has one, and the last tile of keys comes first.
    for b, h, m in itertools.product(range(batch), range(heads), range(query_tiles)):
        turns = []
        for n in range(key_tiles):
            block = n * tile_n // BLOCK
            ends = min(key_tiles, (block + 1) * (BLOCK // tile_n))
            turns += [turn + ends - 1 - n for tile, _, turn in listed(lists, b, h, block) if tile == m]
        assert turns == list(reversed(range(len(turns))))


def test_without_blocks_there_is_nothing_to_list():
    for lengths in ((0, 200), (200, 0), (0, 0)):
        blocks = [-(-length // BLOCK) for length in lengths]
        lists = make_key_lists(mask_of(torch.zeros(1, 1, *blocks), *lengths), 64, 64)
        assert lists.indices.shape == (1, 1, blocks[1], -(-lengths[0] // 64))
        assert not lists.counts.any()


def a_mask() -> BlockMask:
    return mask_of(torch.tensor([[CUT, EMPTY], [WHOLE, CUT]])[None, None], 200, 256)


def test_lists_are_made_once_for_the_tensors_of_a_mask():
    mask = a_mask()
    lists = key_lists(mask, 64, 128)
    # Operators take a mask apart and put it together again.
    again = BlockMask(mask.mask_mod, 200, 256, counts=mask.counts, indices=mask.indices)
    assert key_lists(again, 64, 128) is lists
    assert key_lists(mask, 128, 128) is not lists
    assert key_lists(mask, 64, 128) is lists
    assert key_lists(a_mask(), 64, 128) is not lists


def test_lists_are_made_again_when_the_mask_changes_in_place():
    mask = a_mask()
    before = key_lists(mask, 64, 128)
    mask.counts[0, 0, 0] = torch.tensor([0, 1])
    after = key_lists(mask, 64, 128)
    assert after.counts.tolist() == make_key_lists(mask, 64, 128).counts.tolist() != before.counts.tolist()
    mask.indices[0, 0, 0, 0] = 1
    assert key_lists(mask, 64, 128).counts.tolist() == make_key_lists(mask, 64, 128).counts.tolist()
    other = BlockMask(mask.mask_mod, 200, 256, counts=torch.zeros_like(mask.counts), indices=mask.indices)
    assert not key_lists(other, 64, 128).counts.any()


def test_lists_are_forgotten_with_the_mask():
    mask = a_mask()
    known = len(module._known)
    key_lists(mask, 64, 128)
    assert len(module._known) == known + 1
    del mask
    gc.collect()
    assert len(module._known) == known


def test_what_is_made_on_another_stream_in_a_graph_or_from_inference_tensors_is_not_kept(monkeypatch):
    mask = a_mask()
    lists = key_lists(mask, 64, 128)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_stream_of", lambda tensor: 7)
        assert key_lists(mask, 64, 128) is not lists
    with monkeypatch.context() as patch:
        patch.setattr(module, "_can_be_kept", lambda *tensors: False)
        lists = key_lists(mask, 64, 128)
    assert key_lists(mask, 64, 128) is not lists
    with torch.inference_mode():
        made = a_mask()
        assert key_lists(made, 64, 128) is not key_lists(made, 64, 128)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nothing_waits_for_the_device(tile):
    """No result has a shape that depends on data: on tensors without data all of it can be traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        lists = make_key_lists(mask_of(torch.zeros(2, 3, 4, 5), 4 * BLOCK, 5 * BLOCK), *tile)
    assert lists.indices.shape == (2, 3, 5, 4 * BLOCK // tile[0])
