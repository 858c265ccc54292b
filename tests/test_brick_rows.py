"""Rows of packed heads: where each is, moving them, and their sinks, on the host CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import row_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3.spec import TILE_CLASSES  # noqa: E402

DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
GROUPS = (1, 2, 3, 5, 8, 16)

#: Columns of the q and out tiles of packed kernels, shipped or not.
TILE_COLUMNS = sorted({columns for kind in TILE_CLASSES for columns in kind})


def cases_of(rows: int, heads: int) -> Tensor:
    """(count, 3: row, head of tiles, group), all of them."""
    return torch.tensor(list(itertools.product(range(rows), range(heads), GROUPS)), dtype=torch.int32)


def test_packed_rows_are_the_heads_of_a_query_one_after_the_other():
    cases = cases_of(200, 4)
    results = ints(len(cases), 2, 2)
    call(wrappers.places_of_rows, cases, results, len(cases))
    row, head, group = cases.unbind(1)
    plain, packed = results.unbind(1)
    assert torch.equal(plain, torch.stack([row, head], dim=1))
    assert torch.equal(packed, torch.stack([row // group, head * group + row % group], dim=1))


def test_packed_rows_of_all_heads_are_every_query_of_every_query_head_once():
    seqlen, heads_kv = 13, 3
    for group in GROUPS:
        cases = torch.tensor(list(itertools.product(range(seqlen * group), range(heads_kv), [group])))
        results = ints(len(cases), 2, 2)
        call(wrappers.places_of_rows, cases.int(), results, len(cases))
        every = itertools.product(range(seqlen), range(heads_kv * group))
        assert sorted(map(tuple, results[:, 1].tolist())) == sorted(every)


# moving rows --------------------------------------------------------------------------------------

BATCH, SEQLEN, HEADS_KV = 2, 41, 2


def strided(columns: int, group: int, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, heads, columns), not contiguous, with NaN wherever it has no element."""
    whole = torch.full((BATCH, HEADS_KV * group, SEQLEN + 3, columns + 24), math.nan, dtype=dtype)
    tensor = whole[:, :, 1 : 1 + SEQLEN, 8 : 8 + columns].transpose(1, 2)
    tensor.copy_(torch.randn(tensor.shape))
    return tensor


def move(tensor: Tensor, tile: Tensor, first_row: int, head: int, load: bool) -> None:
    """``first_row`` is that of the block, whose second warpgroup moves its rows, of the last sequence."""
    group = tensor.shape[2] // HEADS_KV
    numbers = (*tensor.stride()[:3], tensor.shape[3], SEQLEN * group, group)
    # The wrapper takes the address of a view as it takes that of a contiguous tensor.
    start = tensor.as_strided((1,), (1,))
    call(
        wrappers.packed_tile,
        *(start, tile, torch.tensor(numbers, dtype=torch.int32), first_row, head, BATCH - 1),
        constants=(tile.shape[1], DTYPES[tensor.dtype], load),
    )


def rows_of_tile(tensor: Tensor, first_row: int, head: int) -> tuple[Tensor, Tensor]:
    """The rows of a tile by the definition, (rows that exist, columns) as a copy, and their places in the tensor."""
    group = tensor.shape[2] // HEADS_KV
    row = torch.tensor([row for row in range(first_row, first_row + 64) if row < SEQLEN * group], dtype=torch.long)
    place = torch.full_like(row, BATCH - 1), row // group, head * group + row % group
    return tensor[place], torch.stack(place)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("columns", TILE_COLUMNS)
def test_packed_rows_come_into_their_tile_and_what_does_not_exist_is_zero(columns, dtype):
    for group, missing, first_row, head in itertools.product(GROUPS[1:], (0, 8, 56), (0, 128), (0, 1)):
        tensor = strided(columns - missing, group, dtype)
        tile = torch.full((64, columns), math.nan, dtype=dtype)
        move(tensor, tile, first_row, head, load=True)
        found, _ = rows_of_tile(tensor, first_row + 64, head)
        expected = torch.zeros_like(tile)
        expected[: len(found), : columns - missing] = found
        assert torch.equal(tile, expected), (group, missing, first_row, head)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("columns", TILE_COLUMNS)
def test_packed_rows_are_written_to_their_places_and_nothing_else_is(columns, dtype):
    for group, missing, first_row, head in itertools.product(GROUPS[1:], (0, 8, 56), (0, 128), (0, 1)):
        tensor = strided(columns - missing, group, dtype)
        whole = tensor._base
        before = whole.clone()
        tile = torch.randn(64, columns).to(dtype)
        move(tensor, tile, first_row, head, load=False)
        _, place = rows_of_tile(tensor, first_row + 64, head)
        expected = torch.as_strided(before, tensor.shape, tensor.stride(), tensor.storage_offset())
        expected[tuple(place)] = tile[: place.shape[1], : columns - missing]
        assert torch.equal(whole.nan_to_num(-7.0), before.nan_to_num(-7.0)), (group, missing, first_row, head)


# sinks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sink_of_a_row_is_that_of_its_head_in_log2_units(dtype, packed):
    cases = cases_of(40, 3)
    row, head, group = cases.long().unbind(1)
    sinks = (100 * torch.randn(3 * max(GROUPS))).to(dtype)
    sinks[4] = -math.inf
    results = floats(len(cases))
    call(wrappers.sinks_of_rows, sinks, cases, results, len(cases), sinks.element_size(), constants=(packed,))
    expected = sinks.double()[head * group + row % group if packed else head] * math.log2(math.e)
    torch.testing.assert_close(results.double(), expected, rtol=1e-6, atol=0)
