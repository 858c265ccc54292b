"""Which keys a query sees and which key tiles a range of queries needs, as the kernels compute it, on the host CPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

cutlass = pytest.importorskip("cutlass")

import brick_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3.backends.hopper import MAX_SEQLEN  # noqa: E402
from mask_bounds import ALL_BOUNDS, KINDS, LONGEST, OPEN, Bounds, for_kernel, sees, visible_keys  # noqa: E402

INF = float("inf")


def test_the_keys_of_a_query_are_those_from_its_first_to_before_its_end():
    cases = [(query, *for_kernel(bounds)) for bounds in ALL_BOUNDS for query in range(LONGEST)]
    results = ints(len(cases), len(KINDS), 2)
    call(wrappers.keys_of_queries, torch.tensor(cases, dtype=torch.int32), results, len(cases))
    first, end = results.view(len(ALL_BOUNDS), LONGEST, len(KINDS), 2).transpose(1, 2).unbind(3)
    assert first.min() >= 0
    keys = torch.arange(LONGEST)
    found = (keys >= first[..., None]) & (keys < end[..., None])
    exists = torch.tensor([[query < bounds[0] for query in range(LONGEST)] for bounds in ALL_BOUNDS])[:, None, :]
    wrong = ((found != visible_keys()).any(3) & exists).nonzero()
    assert len(wrong) == 0, [(ALL_BOUNDS[b], KINDS[kind], query) for b, kind, query in wrong[:3].tolist()]


@pytest.mark.parametrize("tile_n", [1, 4, 16, 48])
def test_key_tiles_are_those_with_a_key_that_is_seen_and_whole_ones_those_that_every_query_sees_all_of(tile_n):
    # Some ranges of queries for each of the bounds: all queries, one, and others.
    draw = random.Random(tile_n)
    cases, ranges = [], []
    for number, bounds in enumerate(ALL_BOUNDS):
        if bounds[0]:
            some = {(0, bounds[0] - 1), (0, 0), tuple(sorted(draw.choices(range(bounds[0]), k=2)))}
            ranges += [(number, first, last) for first, last in sorted(some)]
            cases += [(first, last, *for_kernel(bounds)) for first, last in sorted(some)]
    results = ints(len(cases), len(KINDS), 4)
    call(wrappers.tiles_of_queries, torch.tensor(cases, dtype=torch.int32), results, len(cases), constants=(tile_n,))
    assert results.min() >= 0

    number, first, last = torch.tensor(ranges).unbind(1)
    # How many queries of the range see each key.
    before = torch.nn.functional.pad(visible_keys().short().cumsum(2, dtype=torch.int16), (0, 0, 1, 0))
    kind = torch.arange(len(KINDS))
    seen_by = before[number[:, None], kind, last[:, None] + 1] - before[number[:, None], kind, first[:, None]]
    count = (last - first + 1)[:, None, None]
    tiles = -(-LONGEST // tile_n)
    seen_by = torch.nn.functional.pad(seen_by, (0, tiles * tile_n - LONGEST)).unflatten(2, (tiles, tile_n))
    tile = torch.arange(tiles)
    for name, begin, end, expected in (
        ("needed", results[..., 0], results[..., 1], (seen_by > 0).any(3)),
        ("whole", results[..., 2], results[..., 3], (seen_by == count[..., None]).all(3)),
    ):
        found = (tile >= begin[..., None]) & (tile < end[..., None])
        wrong = (found != expected).any(2).nonzero()
        assert len(wrong) == 0, (name, [(ALL_BOUNDS[ranges[c][0]], ranges[c], KINDS[k]) for c, k in wrong[:3].tolist()])
    assert (results[..., 1] >= results[..., 0]).all(), "the number of tiles is their difference"


def test_a_range_that_begins_behind_the_last_query_has_no_fewer_tiles_than_none():
    # A warpgroup's rows may: it is told so by the rows, but the number of its tiles must be one.
    cases = [(one[0] + beyond, one[0] - 1, *for_kernel(one)) for one in ALL_BOUNDS if one[0] for beyond in (1, 20, 200)]
    results = ints(len(cases), len(KINDS), 4)
    call(wrappers.tiles_of_queries, torch.tensor(cases, dtype=torch.int32), results, len(cases), constants=(16,))
    begin, end = results[..., 0], results[..., 1]
    assert (end >= begin).all()
    assert begin.min() >= 0


def test_queries_before_the_first_need_no_key_tiles_under_a_causal_mask():
    # The first tile of a causal mask begins before query 0 if the queries do not fill it.
    bounds = [one for one in ALL_BOUNDS if one[0] and one[2:] == (OPEN, OPEN, 0)]
    results = []
    for first in (0, -64, -192):
        cases = [(first, last, *for_kernel(one)) for one in bounds for last in {0, one[0] // 2, one[0] - 1}]
        results.append(ints(len(cases), len(KINDS), 4))
        call(
            wrappers.tiles_of_queries, torch.tensor(cases, dtype=torch.int32), results[-1], len(cases), constants=(16,)
        )
    needed = [result[:, KINDS.index("causal"), :2] for result in results]
    assert needed[0].max() > 1
    assert torch.equal(needed[1], needed[0])
    assert torch.equal(needed[2], needed[0])


def seen_range(kind: str, bounds: Bounds, query: int) -> tuple[int, int]:
    """(first, one past the last) key, from the definition, in integers without a limit."""
    seqlen_q, seqlen_k, left, right, chunk = bounds
    position = query + seqlen_k - seqlen_q
    first, end = 0, seqlen_k
    if kind == "causal":
        end = min(end, position + 1)
    elif kind == "window":
        first = first if left is OPEN else max(first, position - left)
        end = end if right is OPEN else min(end, position + right + 1)
        if chunk:
            first, end = max(first, position // chunk * chunk), min(end, position // chunk * chunk + chunk)
    return first, end


@st.composite
def long_bounds(draw: st.DrawFn) -> tuple[Bounds, int]:
    """Bounds as long as kernels take them, and a query."""
    with_chunks = draw(st.booleans())
    longest = (2**30 if with_chunks else MAX_SEQLEN) - 512
    seqlen_q = draw(st.integers(1, longest))
    seqlen_k = draw(st.integers(0, min(longest, MAX_SEQLEN - seqlen_q)))
    side = st.one_of(st.none(), st.integers(0, 300), st.integers(0, seqlen_q + seqlen_k))
    chunk = draw(st.one_of(st.integers(1, 300), st.integers(1, seqlen_q + seqlen_k))) if with_chunks else 0
    query = draw(st.one_of(st.integers(0, seqlen_q - 1), st.integers(max(0, seqlen_q - 300), seqlen_q - 1)))
    # A window as wide as the sequences is an open one: no longer sides reach a kernel.
    left, right = draw(side), draw(side)
    left = OPEN if left is not None and left >= seqlen_k - 1 else left
    right = OPEN if right is not None and right >= seqlen_q - 1 else right
    return (seqlen_q, seqlen_k, left, right, chunk), query


@settings(max_examples=300, deadline=None)
@given(long_bounds())
def test_bounds_of_the_longest_sequences_do_not_overflow(drawn):
    bounds, query = drawn
    results = ints(1, len(KINDS), 2)
    call(wrappers.keys_of_queries, torch.tensor([(query, *for_kernel(bounds))], dtype=torch.int32), results, 1)
    for kind, found in zip(KINDS, results[0].tolist(), strict=True):
        expected = seen_range(kind, bounds, query)
        sees_some = expected[0] < expected[1]
        assert (found[0] < found[1]) == sees_some, kind
        assert not sees_some or tuple(found) == expected, kind


@pytest.mark.parametrize("tile_n", [32, 176, 256])
def test_masks_hide_exactly_the_keys_that_a_query_does_not_see(tile_n):
    draw = random.Random(0)
    cases: list[tuple[int, int, int, Bounds]] = []
    for lengths in [(1, 1), (1, 300), (77, 0), (239, 1), (65, 47), (200, 70), (113, 203), (256, 256)]:
        for _ in range(6):
            left, right = (draw.choice((0, 1, 9, 64, 150, OPEN)) for _ in range(2))
            bounds = (*lengths, left, right, draw.choice((0, 0, 1, 7, 64, 100)))
            cases.append((draw.choice((0, 64, 192)), draw.choice((1, 2, 3, 8)), tile_n * draw.choice((0, 1)), bounds))
    given_cases = [(row, group, key, *for_kernel(bounds)) for row, group, key, bounds in cases]
    registers = tile_n // 2
    results = floats(len(cases), len(KINDS), 128, registers)
    arguments = torch.tensor(given_cases, dtype=torch.int32), results, len(cases)
    call(wrappers.masked_tiles, *arguments, constants=(tile_n,))

    # The instruction's layout, from its description in the PTX manual.
    thread, register = torch.meshgrid(torch.arange(128), torch.arange(registers), indexing="ij")
    row_of = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    key_of = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    hidden = 0
    for (row, group, key, bounds), result in zip(cases, results, strict=True):
        for kind, found in zip(KINDS, result, strict=True):
            # Rows behind the last have queries too, whatever is said of them is not used.
            queries = (row + torch.arange(64)) // group
            visible = sees(kind, bounds, queries, key + torch.arange(tile_n))[row_of, key_of]
            exists = queries[row_of] < bounds[0]
            expected = torch.where(visible, register.float(), -INF)
            assert torch.equal(found[exists], expected[exists]), (kind, row, group, key, bounds)
            hidden += int((expected == -INF).sum())
    assert 0.1 < hidden / results.numel() < 0.9


def test_a_word_has_a_bit_for_each_of_the_columns_before_a_key():
    numbers = torch.tensor([*range(-80, 400), 2**31 - 1, -(2**31), -(2**31) + 1], dtype=torch.int32)
    columns, bits = ints(len(numbers)), ints(len(numbers))
    call(wrappers.words, numbers, columns, bits, len(numbers))
    # Of a thread in the first lane of its quad.
    keys_of_columns = [8 * (column // 2) + column % 2 for column in range(200)]
    for number, before, word in zip(numbers.tolist(), columns.tolist(), bits.tolist(), strict=True):
        if number < 400:
            assert before == sum(key < number for key in keys_of_columns), number
        assert word & 0xFFFFFFFF == (1 << min(max(number, 0), 32)) - 1, number
