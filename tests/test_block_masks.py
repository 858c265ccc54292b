"""The blocks of queries and keys that a mask leaves empty, cuts, or leaves whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fa3
from fa3 import block_masks, mods
from fa3.mods import BLOCK, CUT, EMPTY, WHOLE, BlockMask, MaskMod


def broadcast_indices(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    sizes = (batch, heads, seqlen_q, seqlen_k)
    return [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]


def backward_only(batch, head, q_index, kv_index):
    return kv_index <= q_index


def of_table(batch, head, q_index, kv_index, table, heads):
    """A mask that is listed: table (batch * heads, seqlen_q, seqlen_k) int32; heads (1,) int32."""
    return table[batch * heads + head, q_index, kv_index] != 0


def listed(visible: Tensor) -> MaskMod:
    heads = torch.tensor([visible.shape[1]], dtype=torch.int32)
    return MaskMod("modified:of_table", of_table, (visible.int().flatten(0, 1).contiguous(), heads))


@st.composite
def masks_in_blocks(draw) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k) that is empty, whole, or one pair away from either, block by block."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    lengths = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    visible = torch.zeros(batch, heads, *lengths, dtype=torch.bool)
    kinds = st.sampled_from(["empty", "whole", "one", "all but one", "last row", "last column"])
    for b in range(batch):
        for h in range(heads):
            for rows in visible[b, h].split(BLOCK):
                for block in rows.split(BLOCK, dim=1):
                    kind = draw(kinds)
                    block[:] = kind in ("whole", "all but one")
                    if kind in ("one", "all but one"):
                        place = draw(st.integers(0, block.numel() - 1))
                        block[place // block.shape[1], place % block.shape[1]] ^= True
                    elif kind == "last row":
                        block[-1] = True
                    elif kind == "last column":
                        block[:, -1] = True
    return visible


def lists_of_blocks(visible: Tensor) -> list[tuple[list[int], list[int]]]:
    """(cut, whole) key blocks of every query block of every head, straight from the definition."""
    lists = []
    for head in visible.flatten(0, 1):
        for rows in head.split(BLOCK):
            blocks = list(enumerate(rows.split(BLOCK, dim=1)))
            whole = [j for j, block in blocks if block.all() and block.shape[1] == BLOCK]
            cut = [j for j, block in blocks if block.any() and j not in whole]
            lists.append((cut[::-1], whole[::-1]))
    return lists


def lists_of(mask: BlockMask) -> list[tuple[list[int], list[int]]]:
    counts, indices = mask.counts.flatten(0, 2).tolist(), mask.indices.flatten(0, 2).tolist()
    return [(row[:cut], row[cut : cut + whole]) for (cut, whole), row in zip(counts, indices, strict=True)]


@settings(max_examples=60, deadline=None)
@given(masks_in_blocks(), st.sampled_from([1, BLOCK**2, 3 * BLOCK**2, 6 * BLOCK**2, 1 << 24]))
def test_blocks_are_those_of_the_dense_mask(visible, pairs_per_step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_masks, "_PAIRS_PER_STEP", pairs_per_step)
        mask = fa3.create_block_mask(listed(visible), *visible.shape)
    expected = lists_of_blocks(visible)
    assert lists_of(mask) == expected
    kinds = mask.kinds().flatten(0, 2).tolist()
    for row, (cut, whole) in zip(kinds, expected, strict=True):
        assert row == [CUT if j in cut else WHOLE if j in whole else EMPTY for j in range(len(row))]
    visited = sum(len(cut) + len(whole) for cut, whole in expected)
    assert mask.sparsity == pytest.approx(1 - visited / mask.indices.numel())


@pytest.mark.parametrize("name", ["prefix_lm", "document", "document_causal"])
def test_blocks_of_ready_made_masks_are_those_of_the_dense_mask(name):
    seqlen = 300
    ids = (torch.arange(seqlen) // 130).int().expand(2, -1).contiguous()
    mod = {
        "prefix_lm": mods.prefix_lm(torch.tensor([140, 0], dtype=torch.int32)),
        "document": mods.document(ids),
        "document_causal": mods.document(ids, causal=True),
    }[name]
    visible = mod.torch(*broadcast_indices(2, 1, seqlen, seqlen), *mod.aux).expand(2, 1, seqlen, seqlen)
    assert lists_of(fa3.create_block_mask(mod, 2, None, seqlen, seqlen)) == lists_of_blocks(visible)


def sees_all(batch, head, q_index, kv_index):
    return torch.ones((), dtype=torch.bool)


def test_queries_behind_the_last_have_no_say_and_a_block_behind_the_last_key_is_cut():
    mask = fa3.create_block_mask(MaskMod("modified:sees_all", sees_all), None, None, BLOCK + 1, 2 * BLOCK + 1)
    assert mask.kinds().tolist() == [[[[WHOLE, WHOLE, CUT]] * 2]]


def test_no_sizes_mean_one_mask_for_all_sequences_and_heads():
    mod = MaskMod("modified:backward_only", backward_only)
    for batch, heads in ((None, None), (1, 1), (None, 1)):
        mask = fa3.create_block_mask(mod, batch, heads, 256, 256)
        assert mask.indices.shape == (1, 1, 2, 2)
    assert fa3.create_block_mask(mod, 3, 2, 256, 256).kinds().tolist() == mask.kinds().expand(3, 2, 2, 2).tolist()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)])
def test_sequences_of_nothing_have_no_blocks_to_visit(batch, seqlen_q, seqlen_k):
    mask = fa3.create_block_mask(MaskMod("modified:backward_only", backward_only), batch, 1, seqlen_q, seqlen_k)
    assert mask.counts.sum() == 0
    assert mask.kinds().shape == mask.indices.shape == (batch, 1, min(seqlen_q, 1), min(seqlen_k, 1))
    assert mask.sparsity == 0.0
    assert str(mask).startswith("BlockMask")


_sizes_asked: list[int] = []


def counting(batch, head, q_index, kv_index):
    _sizes_asked.append(torch.broadcast_shapes(batch.shape, head.shape, q_index.shape, kv_index.shape).numel())
    return kv_index <= q_index


@pytest.mark.parametrize("blocks_per_step", [1, 2, 7, 20])
def test_a_mask_is_evaluated_in_pieces_of_bounded_size(monkeypatch, blocks_per_step):
    monkeypatch.setattr(block_masks, "_PAIRS_PER_STEP", blocks_per_step * BLOCK**2)
    _sizes_asked.clear()
    fa3.create_block_mask(MaskMod("modified:counting", counting), 2, 3, 400, 600)
    assert max(_sizes_asked) <= blocks_per_step * BLOCK**2
    assert sum(_sizes_asked) == 2 * 3 * 400 * 600


def test_the_largest_piece_is_small_beside_the_memory_of_a_gpu():
    assert BLOCK**2 <= block_masks._PAIRS_PER_STEP <= 1 << 26


def returns_numbers(batch, head, q_index, kv_index):
    return q_index - kv_index


def returns_a_bool(batch, head, q_index, kv_index):
    return True


def returns_three(batch, head, q_index, kv_index):
    return torch.ones(3, dtype=torch.bool)


def returns_five_dims(batch, head, q_index, kv_index):
    return (q_index <= kv_index)[None]


@pytest.mark.parametrize(
    ("twin", "error", "message"),
    [
        (returns_numbers, TypeError, "returned torch.int64: must be a bool tensor"),
        (returns_a_bool, TypeError, "returned bool: must be a bool tensor"),
        (returns_three, ValueError, r"returned shape \(3,\): must broadcast to .* = \(1, 1, 5, 5\)"),
        (returns_five_dims, ValueError, r"returned shape \(1, 1, 1, 5, 5\): must broadcast"),
    ],
)
def test_bad_results_of_a_twin_are_named(twin, error, message):
    name = f"modified:{twin.__name__}"
    with pytest.raises(error, match=f"'{name}' {message}"):
        fa3.create_block_mask(MaskMod(name, twin), 1, 1, 5, 5)


BACKWARD_ONLY = MaskMod("modified:backward_only", backward_only)
DOCUMENT = mods.document(torch.zeros(2, 300, dtype=torch.int32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((backward_only, 1, 1, 5, 5), TypeError, "mask_mod must be a MaskMod, not function"),
        ((BACKWARD_ONLY, 1, 1, 5.0, 5), TypeError, "seqlen_q=5.0: must be an int, not float"),
        ((BACKWARD_ONLY, True, 1, 5, 5), TypeError, "batch=True: must be an int, not bool"),
        ((BACKWARD_ONLY, 1, -1, 5, 5), ValueError, "heads=-1: must not be negative"),
        ((DOCUMENT, None, None, 300, 300), ValueError, r"document_ids has shape \(2, 300\).*batch must be 1"),
        ((DOCUMENT, 2, None, 301, 300), ValueError, "seqlen must be at least 301"),
        (
            (DOCUMENT, 2, None, 300, 300, "meta"),
            ValueError,
            r"aux\[0\] of mask_mod is on cpu: must be on device='meta'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        fa3.create_block_mask(*arguments)


COUNTS, INDICES = torch.zeros(1, 2, 3, 2, dtype=torch.int32), torch.zeros(1, 2, 3, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask_mod": None}, TypeError, "mask_mod must be a MaskMod, not NoneType"),
        ({"counts": [1]}, TypeError, "counts must be a torch.Tensor, not list"),
        ({"indices": INDICES.long()}, TypeError, "indices has dtype torch.int64: must be torch.int32"),
        ({"seqlen_q": 385}, ValueError, r"counts has shape \(1, 2, 3, 2\): for seqlen_q=385 .* heads or 1, 4, 2\)"),
        ({"seqlen_k": 128}, ValueError, r"indices has shape \(1, 2, 3, 4\): for .* heads or 1, 3, 1\)"),
        ({"counts": COUNTS[0]}, ValueError, r"counts has shape \(2, 3, 2\)"),
        ({"counts": COUNTS[:, :1]}, ValueError, "the first two dims must be the same"),
        ({"indices": INDICES.mT.contiguous().mT}, ValueError, "indices must be contiguous"),
        ({"indices": INDICES.to("meta")}, ValueError, "on devices cpu, meta and .*: must be the same"),
        ({"mask_mod": DOCUMENT, "counts": COUNTS.to("meta"), "indices": INDICES.to("meta")}, ValueError, "'cpu'"),
    ],
)
def test_bad_parts_of_a_block_mask_are_named(changed, error, message):
    parts = {"mask_mod": BACKWARD_ONLY, "seqlen_q": 384, "seqlen_k": 512, "counts": COUNTS, "indices": INDICES}
    BlockMask(**parts)
    with pytest.raises(error, match=message):
        BlockMask(**{**parts, **changed})


def test_what_follows_the_visited_blocks_is_not_read():
    mask = fa3.create_block_mask(BACKWARD_ONLY, 1, 1, 512, 512)
    unread = torch.arange(4) >= mask.counts.sum(-1, keepdim=True)
    spoilt = dataclasses.replace(mask, indices=mask.indices.masked_fill(unread, -(10**6)))
    assert torch.equal(spoilt.kinds(), mask.kinds())


def test_a_block_mask_moves_with_its_tensors():
    mask = fa3.create_block_mask(DOCUMENT, 2, None, 300, 300)
    moved = mask.to("meta")
    assert moved.counts.is_meta
    assert moved.indices.is_meta
    assert moved.mask_mod.aux[0].is_meta
    assert (moved.seqlen_q, moved.seqlen_k, moved.mask_mod.torch) == (300, 300, mask.mask_mod.torch)
    assert not mask.mask_mod.aux[0].is_meta


def test_the_picture_shows_each_block():
    first, *picture = str(fa3.create_block_mask(BACKWARD_ONLY, None, None, 384, 384)).splitlines()
    assert first == (
        "BlockMask(batch=1, heads=1, seqlen_q=384, seqlen_k=384, mask_mod=modified:backward_only): "
        "33.3% of the blocks are not visited"
    )
    assert picture == ["▒▒····", "██▒▒··", "████▒▒"]


def test_the_picture_of_a_long_mask_stays_small():
    lines = str(fa3.create_block_mask(BACKWARD_ONLY, None, None, 2 * BLOCK, 100 * BLOCK)).splitlines()[1:]
    assert lines == ["▒▒" + "··" * 24]
