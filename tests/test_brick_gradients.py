"""What the backward asks of masks and scores, compiled for the host and run on the CPU, against plain definitions."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import brick_wrappers  # noqa: E402
import gradient_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3.backends.hopper import MAX_SEQLEN  # noqa: E402
from mask_bounds import ALL_BOUNDS, KINDS, LONGEST, OPEN, Bounds, for_kernel, sees, visible_keys  # noqa: E402

INF = math.inf
REGISTERS = wrappers.REGISTERS
COLUMNS = brick_wrappers.COLUMNS

# The instruction's layout, from its description in the PTX manual; scores are transposed: rows are keys.
_THREAD, _REGISTER = torch.meshgrid(torch.arange(128), torch.arange(REGISTERS), indexing="ij")
KEY_OF = 16 * (_THREAD // 32) + _THREAD % 32 // 4 + 8 * (_REGISTER // 2 % 2)
QUERY_OF = 8 * (_REGISTER // 4) + 2 * (_THREAD % 4) + _REGISTER % 2


def run(wrapper: object, cases: list[tuple[int, ...]], results: Tensor, *constants: int) -> Tensor:
    call(wrapper, torch.tensor(cases, dtype=torch.int32), results, len(cases), constants=constants)
    return results


# Masks, seen from a key -------------------------------------------------------------------------------------------


def test_the_queries_that_see_a_key_are_those_from_its_first_to_before_its_end():
    cases = [(key, *for_kernel(bounds)) for bounds in ALL_BOUNDS for key in range(LONGEST)]
    results = run(wrappers.queries_of_keys, cases, ints(len(cases), len(KINDS), 2))
    first, end = results.view(len(ALL_BOUNDS), LONGEST, len(KINDS), 2).transpose(1, 2).unbind(3)
    assert first.min() >= 0
    queries = torch.arange(LONGEST)
    found = (queries >= first[..., None]) & (queries < end[..., None])
    lengths = torch.tensor([bounds[:2] for bounds in ALL_BOUNDS])
    exists = queries < lengths[:, 1, None]
    expected = visible_keys().transpose(2, 3) & (queries < lengths[:, 0, None])[:, None, None]
    wrong = ((found != expected).any(3) & exists[:, None]).nonzero()
    assert len(wrong) == 0, [(ALL_BOUNDS[b], KINDS[kind], key) for b, kind, key in wrong[:3].tolist()]


@pytest.mark.parametrize("tile_m", [1, 4, 16, 48])
def test_query_tiles_are_those_with_a_query_that_sees_a_key_and_whole_ones_those_that_see_all(tile_m):
    draw = random.Random(tile_m)
    cases, ranges = [], []
    for number, bounds in enumerate(ALL_BOUNDS):
        if bounds[1]:
            some = {(0, bounds[1] - 1), (0, 0), tuple(sorted(draw.choices(range(bounds[1]), k=2)))}
            ranges += [(number, first, last) for first, last in sorted(some)]
            cases += [(first, last, *for_kernel(bounds)) for first, last in sorted(some)]
    results = run(wrappers.tiles_of_keys, cases, ints(len(cases), len(KINDS), 4), tile_m)
    assert results.min() >= 0
    assert (results[..., 1] >= results[..., 0]).all(), "the number of tiles is their difference"

    number, first, last = torch.tensor(ranges).unbind(1)
    lengths = torch.tensor([bounds[0] for bounds in ALL_BOUNDS])
    visible = visible_keys() & (torch.arange(LONGEST) < lengths[:, None])[:, None, :, None]
    # How many keys of the range each query sees.
    before = torch.nn.functional.pad(visible.short().cumsum(3, dtype=torch.int16), (1, 0)).transpose(2, 3)
    kind = torch.arange(len(KINDS))
    seen = before[number[:, None], kind, last[:, None] + 1] - before[number[:, None], kind, first[:, None]]
    count = (last - first + 1)[:, None, None]
    tiles = -(-LONGEST // tile_m)
    seen = torch.nn.functional.pad(seen, (0, tiles * tile_m - LONGEST)).unflatten(2, (tiles, tile_m))
    tile = torch.arange(tiles)
    for name, begin, end, expected in (
        ("needed", results[..., 0], results[..., 1], (seen > 0).any(3)),
        ("whole", results[..., 2], results[..., 3], (seen == count[..., None]).all(3)),
    ):
        found = (tile >= begin[..., None]) & (tile < end[..., None])
        wrong = (found != expected).any(2).nonzero()
        assert len(wrong) == 0, (name, [(ALL_BOUNDS[ranges[c][0]], ranges[c], KINDS[k]) for c, k in wrong[:3].tolist()])


def key_range(kind: str, bounds: Bounds, key: int) -> tuple[int, int]:
    """(first, one past the last) query that sees a key, from the definition, in integers without a limit."""
    seqlen_q, seqlen_k, left, right, chunk = bounds
    # Positions first: the queries have those from the first to before the last key.
    first_position = seqlen_k - seqlen_q
    first, end = first_position, seqlen_k
    if kind == "causal":
        first = max(first, key)
    elif kind == "window":
        first = first if right is OPEN else max(first, key - right)
        end = end if left is OPEN else min(end, key + left + 1)
        if chunk:
            first, end = max(first, key // chunk * chunk), min(end, key // chunk * chunk + chunk)
    return first - first_position, end - first_position


@st.composite
def long_bounds(draw: st.DrawFn) -> tuple[Bounds, int, int]:
    """Bounds as long as kernels take them, a key, and a query near its position."""
    with_chunks = draw(st.booleans())
    longest = (2**30 if with_chunks else MAX_SEQLEN) - 512
    seqlen_k = draw(st.integers(1, longest))
    seqlen_q = draw(st.integers(1, max(1, min(longest, MAX_SEQLEN - seqlen_k))))
    side = st.one_of(st.none(), st.integers(0, 300), st.integers(0, seqlen_q + seqlen_k))
    chunk = draw(st.one_of(st.integers(1, 300), st.integers(1, seqlen_q + seqlen_k))) if with_chunks else 0
    key = draw(st.one_of(st.integers(0, seqlen_k - 1), st.integers(max(0, seqlen_k - 300), seqlen_k - 1)))
    near = key + seqlen_q - seqlen_k + draw(st.integers(-500, 500))
    query = min(max(near, 0), seqlen_q - 1)
    # A window as wide as the sequences is an open one: no longer sides reach a kernel.
    left, right = draw(side), draw(side)
    left = OPEN if left is not None and left >= seqlen_k - 1 else left
    right = OPEN if right is not None and right >= seqlen_q - 1 else right
    return (seqlen_q, seqlen_k, left, right, chunk), key, query


@settings(max_examples=300, deadline=None)
@given(long_bounds())
def test_bounds_of_the_longest_sequences_do_not_overflow(drawn):
    bounds, key, _ = drawn
    results = run(wrappers.queries_of_keys, [(key, *for_kernel(bounds))], ints(1, len(KINDS), 2))
    for kind, found in zip(KINDS, results[0].tolist(), strict=True):
        expected = key_range(kind, bounds, key)
        sees_some = expected[0] < expected[1]
        assert (found[0] < found[1]) == sees_some, kind
        assert not sees_some or tuple(found) == expected, kind


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 8), (8, 4), (16, 16)])
def test_a_query_tile_and_a_key_tile_see_each_other_from_either_side(tile_m, tile_n):
    # The fixed order of the sums of dQ counts the key tiles of a query tile, and each of them must come to add.
    bounds = [one for one in ALL_BOUNDS if one[0] and one[1]]
    m_tiles, n_tiles = -(-LONGEST // tile_m), -(-LONGEST // tile_n)
    by_keys = torch.zeros(len(bounds), len(KINDS), m_tiles, n_tiles, dtype=torch.bool)
    by_queries = torch.zeros_like(by_keys)
    key_cases, query_cases, key_places, query_places = [], [], [], []
    for number, one in enumerate(bounds):
        for n in range(-(-one[1] // tile_n)):
            key_cases.append((n * tile_n, min((n + 1) * tile_n, one[1]) - 1, *for_kernel(one)))
            key_places.append((number, n))
        for m in range(-(-one[0] // tile_m)):
            query_cases.append((m * tile_m, min((m + 1) * tile_m, one[0]) - 1, *for_kernel(one)))
            query_places.append((number, m))
    found = run(wrappers.tiles_of_keys, key_cases, ints(len(key_cases), len(KINDS), 4), tile_m)
    number, n = torch.tensor(key_places).unbind(1)
    tile = torch.arange(m_tiles)
    by_keys.permute(0, 3, 1, 2)[number, n] = (tile >= found[..., :1]) & (tile < found[..., 1:2])
    found = run(brick_wrappers.tiles_of_queries, query_cases, ints(len(query_cases), len(KINDS), 4), tile_n)
    number, m = torch.tensor(query_places).unbind(1)
    tile = torch.arange(n_tiles)
    by_queries.permute(0, 2, 1, 3)[number, m] = (tile >= found[..., :1]) & (tile < found[..., 1:2])
    wrong = (by_keys != by_queries).nonzero()
    assert len(wrong) == 0, [(bounds[b], KINDS[kind], m, n) for b, kind, m, n in wrong[:3].tolist()]
    assert 0.1 < by_keys.float().mean() < 0.9


@settings(max_examples=300, deadline=None)
@given(long_bounds(), st.sampled_from([(64, 128), (128, 128), (64, 64)]))
def test_they_do_in_the_longest_sequences_too(drawn, tiles):
    (tile_m, tile_n), (bounds, key, query) = tiles, drawn
    m, n = query // tile_m, key // tile_n
    keys = (n * tile_n, min((n + 1) * tile_n, bounds[1]) - 1)
    queries = (m * tile_m, min((m + 1) * tile_m, bounds[0]) - 1)
    by_keys = run(wrappers.tiles_of_keys, [(*keys, *for_kernel(bounds))], ints(1, len(KINDS), 4), tile_m)[0].tolist()
    by_queries = run(
        brick_wrappers.tiles_of_queries, [(*queries, *for_kernel(bounds))], ints(1, len(KINDS), 4), tile_n
    )[0].tolist()
    for kind, of_keys, of_queries in zip(KINDS, by_keys, by_queries, strict=True):
        assert (of_keys[0] <= m < of_keys[1]) == (of_queries[0] <= n < of_queries[1]), kind


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_masks_hide_exactly_the_queries_that_do_not_see_a_key(columns):
    draw = random.Random(0)
    cases: list[tuple[int, int, Bounds]] = []
    for lengths in [(1, 1), (300, 1), (1, 77), (239, 1), (65, 47), (200, 70), (113, 203), (256, 256)]:
        for _ in range(6):
            left, right = (draw.choice((0, 1, 9, 64, 150, OPEN)) for _ in range(2))
            bounds = (*lengths, left, right, draw.choice((0, 0, 1, 7, 64, 100)))
            cases.append((64 * draw.choice((0, 1)), columns * draw.choice((0, 1)), bounds))
    given_cases = [(key, query, *for_kernel(bounds)) for key, query, bounds in cases]
    registers = columns // 2
    results = run(wrappers.masked_tiles, given_cases, floats(len(cases), len(KINDS), 128, registers), columns)

    thread, register = torch.meshgrid(torch.arange(128), torch.arange(registers), indexing="ij")
    key_of = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    query_of = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    hidden = 0
    for (key, query, bounds), result in zip(cases, results, strict=True):
        for kind, found in zip(KINDS, result, strict=True):
            queries, keys = query + torch.arange(columns), key + torch.arange(64)
            visible = sees(kind, bounds, queries, keys)[query_of, key_of]
            # Those behind the last query have an LSE of +inf, whatever is left of their scores.
            exists = queries[query_of] < bounds[0]
            expected = torch.where(visible, register.float(), -INF)
            assert torch.equal(found[exists], expected[exists]), (kind, key, query, bounds)
            hidden += int((expected == -INF).sum())
    assert 0.1 < hidden / results.numel() < 0.9


# Probabilities ------------------------------------------------------------------------------------------------------

DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_are_powers_of_two_of_scaled_scores_beyond_the_lse_of_their_column(dtype):
    scores, lse = 10 * torch.randn(128, REGISTERS), 10 * torch.randn(COLUMNS)
    scores[3, :4] = -INF
    # Of rows that see no key, and of those that fill up a tile.
    lse[5] = INF
    found, rounded = floats(128, REGISTERS), floats(128, REGISTERS)
    call(wrappers.probabilities, scores, lse, found, rounded, 0.3, constants=(DTYPES[dtype],))
    exponent = 0.3 * scores.double() - lse.double()[QUERY_OF]
    expected = torch.exp2(exponent)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(rounded, found.to(dtype).float())
    assert (found == 0).sum() == 4 + 128 // 4 * 2


# Softcap, modifications, dS -----------------------------------------------------------------------------------------

#: (first key, first query, batch, head)
CASES = [(0, 0, 0, 0), (64, 0, 1, 2), (128, 32, 0, 3)]
NAME_PLACE, DERIVATIVE, MASK = "score_wrappers:name_place", "gradient_wrappers:times_place", "score_wrappers:sees_some"


def places() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch, head, query and key of each register of each thread in all CASES."""
    first_key, first_query, batch, head = torch.tensor(CASES)[:, :, None, None].unbind(1)
    zero = torch.zeros_like(first_key + KEY_OF)
    return batch + zero, head + zero, first_query + QUERY_OF, first_key + KEY_OF


def chain(
    scores: Tensor, dp: Tensor, delta: Tensor, score_mod: str = "", derivative: str = "", mask_mod: str = "",
    capped: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores after all that changes them, and dS; factors are 1/8 before the tanh and 1/2 before ``score_mod``."""
    after, ds = (floats(len(CASES), 128, REGISTERS) for _ in range(2))
    cases = torch.tensor(CASES, dtype=torch.int32)
    constants = (score_mod, derivative, mask_mod, capped)
    call(wrappers.chain, cases, scores, dp, delta, after, ds, len(CASES), 0.125, 0.5, constants=constants)
    return after, ds


def assert_rounded_to_bf16(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found.double(), expected.double().expand(found.shape), rtol=2**-8, atol=1e-6)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return 4 * torch.randn(128, REGISTERS), torch.randn(128, REGISTERS), torch.randn(COLUMNS)


def test_without_any_change_ds_is_dp_less_the_delta_of_its_column():
    scores, dp, delta = inputs()
    after, ds = chain(scores, dp, delta)
    assert torch.equal(after, scores.expand(after.shape))
    assert_rounded_to_bf16(ds, dp - delta[QUERY_OF])


def test_under_a_cap_ds_gets_the_derivative_of_the_hyperbolic_tangent():
    scores, dp, delta = inputs()
    after, ds = chain(scores, dp, delta, capped=True)
    tanh = (scores.double() / 8).tanh()
    torch.testing.assert_close(after.double(), tanh.expand(after.shape), rtol=0, atol=1e-6)
    assert_rounded_to_bf16(ds, (dp - delta[QUERY_OF]) * (1 - tanh**2))


def test_a_modification_and_its_derivative_get_the_scaled_score_and_its_place():
    scores, dp, delta = (_REGISTER.float(), *inputs()[1:])
    batch, head, query, key = places()
    after, ds = chain(scores, dp, delta, NAME_PLACE, DERIVATIVE)
    expected = 0.5 * _REGISTER + 16 * (key + 256 * (query + 64 * (head + 8 * batch)))
    assert expected.max() < 2**24, "exact in float32"
    assert torch.equal(after, expected)
    factor = 0.5 * _REGISTER + query + 100 * key + 1000 * head + 10_000 * batch
    assert_rounded_to_bf16(ds, (dp - delta[QUERY_OF]) * factor)


def test_under_a_cap_the_derivative_of_a_modification_is_taken_at_the_capped_score():
    scores, dp, delta = inputs()
    batch, head, query, key = places()
    _, ds = chain(scores, dp, delta, NAME_PLACE, DERIVATIVE, capped=True)
    tanh = (scores.double() / 8).tanh()
    factor = 0.5 * tanh + query + 100 * key + 1000 * head + 10_000 * batch
    assert_rounded_to_bf16(ds, (dp - delta[QUERY_OF]) * factor * (1 - tanh**2))


def test_a_mask_hides_where_its_function_says_no():
    scores, dp, delta = inputs()
    batch, head, query, key = places()
    after, ds = chain(scores, dp, delta, mask_mod=MASK)
    visible = (key + 2 * query + 3 * head + 5 * batch) % 7 < 4
    assert torch.equal(after, torch.where(visible, scores, -INF))
    # What is hidden has P = 0; here P is 1 everywhere.
    assert_rounded_to_bf16(ds, dp - delta[QUERY_OF])
