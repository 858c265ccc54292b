"""The kernels' building bricks, compiled for the host and run on the CPU, against plain definitions.

What exists only on the GPU is replaced while compiling: the float maximum instruction by the DSL's portable
one, and the exchange between lanes by that of a warp whose lanes all hold the same values.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from torch import Tensor  # noqa: E402

import brick_wrappers as wrappers  # noqa: E402
from fa3.kernels import forward  # noqa: E402
from fa3.kernels.parts import layout, softmax  # noqa: E402
from fa3.kernels.parts.barriers import NamedBarrier  # noqa: E402

INF, NAN = math.inf, math.nan

#: Its sign bit is set, so as an integer it is below every number that is not negative.
NEGATIVE_NAN = torch.tensor(-(2**22), dtype=torch.int32).view(torch.float32)


@functools.cache
def compiled(entry: Callable[..., None], types: tuple[type, ...], constants: tuple[Any, ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "fmax", cute.math.max)
        patch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, offset: value)
        patch.setattr(cute.arch, "vote_any_sync", lambda predicate: predicate)
        return cute.compile(entry, *(t(0) for t in types), *constants, options="--gpu-arch sm_90a")


def call(entry: Callable[..., None], *arguments: Tensor | int | float, constants: tuple[Any, ...] = ()) -> None:
    """Run a wrapper: tensors go as addresses, numbers as 32-bit values."""
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous()
            values.append(cutlass.Int64(argument.data_ptr()))
        else:
            values.append(cutlass.Int32(argument) if isinstance(argument, int) else cutlass.Float32(argument))
    compiled(entry, tuple(type(v) for v in values), constants)(*values)


def ints(*shape: int) -> Tensor:
    """A result that no correct answer is equal to yet."""
    return torch.full(shape, -(10**6), dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    return torch.full(shape, -1e30)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


# layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile_n", [8, 64, 80, 128, 176, 256])
def test_the_threads_of_a_warpgroup_cover_their_tile_exactly_once(tile_n):
    seen = [
        (
            layout.first_row(thread // 32, thread % 32) + 8 * r,
            layout.first_column(thread % 32) + layout.column_in_tile(c),
        )
        for thread in range(128)
        for r in range(layout.ROWS_PER_THREAD)
        for c in range(tile_n // 4)
    ]
    assert sorted(seen) == list(itertools.product(range(64), range(tile_n)))


def test_a_row_belongs_to_four_neighbouring_lanes():
    for thread in range(128):
        row = layout.first_row(thread // 32, thread % 32)
        assert row == layout.first_row(thread // 32, thread % 32 // 4 * 4)
        for offset in (1, 2):
            assert row == layout.first_row(thread // 32, (thread % 32) ^ offset)


@functools.cache
def accumulator_layout() -> tuple[Tensor, Tensor, Tensor]:
    results = ints(128, wrappers.COLUMNS // 2), ints(128, wrappers.COLUMNS // 2), ints(128, 8)
    call(wrappers.accumulator_layout, *results)
    return results


def test_rows_and_columns_lie_where_the_instruction_puts_them():
    ours, chip, _ = accumulator_layout()
    assert torch.equal(ours, chip)


def test_score_registers_are_the_operand_of_the_next_product_without_a_shuffle():
    ours, _, operand = accumulator_layout()
    for step in range(wrappers.COLUMNS // 16):
        assert torch.equal(ours[:, 8 * step : 8 * step + 8] - 64 * 16 * step, operand)


# mask ---------------------------------------------------------------------------------------------


LENGTHS = (0, 1, 2, 15, 16, 17, 64, 79, 128, 200)


def sees(rows: Tensor, keys: Tensor, seqlen_q: int, seqlen_k: int, causal: bool) -> Tensor:
    """(rows, keys) -> whether the row sees the key, straight from the definition."""
    inside = (keys < seqlen_k).expand(len(rows), -1)
    return inside & (keys <= rows[:, None] + seqlen_k - seqlen_q) if causal else inside


def test_bounds_of_keys_and_key_tiles_are_those_of_the_mask():
    # Rows beyond the last are asked for too: a tile's second warpgroup may begin there.
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    cases = torch.tensor([(row, q, k) for q, k in pairs for row in range(q + 65)], dtype=torch.int32)
    results = ints(len(cases), len(wrappers.TILE_NS), 2, 3)
    call(wrappers.key_bounds, cases, results, len(cases))

    begin = 0
    for seqlen_q, seqlen_k in pairs:
        rows = torch.arange(seqlen_q + 65)
        here = results[begin : begin + len(rows)]
        begin += len(rows)
        for t, tile_n in enumerate(wrappers.TILE_NS):
            tiles = -(-max(LENGTHS) // tile_n) + 1
            keys = torch.arange(tiles * tile_n)
            for causal in (False, True):
                visible = sees(rows, keys, seqlen_q, seqlen_k, causal)
                counted, needed, whole = here[:, t, int(causal)].unbind(1)
                case = f"{seqlen_q=} {seqlen_k=} {tile_n=} {causal=}"
                assert torch.equal(keys < counted[:, None], visible), case
                assert min(needed.min(), whole.min()) >= 0, case
                in_tiles = visible.view(len(rows), tiles, tile_n)
                of_this_or_above = in_tiles.any(2).int().cummax(0).values.bool()
                assert torch.equal(torch.arange(tiles) < needed[:, None], of_this_or_above), case
                of_this_and_below = in_tiles.all(2).int().flip(0).cummin(0).values.flip(0).bool()
                assert torch.equal(torch.arange(tiles) < whole[:, None], of_this_and_below), case


def test_mask_hides_exactly_the_keys_that_a_row_does_not_see():
    cases = [
        (row, key, seqlen_q, seqlen_k)
        for row in (0, 64, 192)
        for key in (0, 32, 64, 224)
        for seqlen_q, seqlen_k in [(1, 1), (1, 300), (77, 0), (239, 1), (65, 47), (200, 70), (113, 203), (256, 256)]
    ]
    registers = wrappers.COLUMNS // 2
    results = floats(len(cases), 2, 128, registers)
    call(wrappers.masked_tiles, torch.tensor(cases, dtype=torch.int32), results, len(cases))

    # The instruction's layout, from its description in the PTX manual.
    thread, register = torch.meshgrid(torch.arange(128), torch.arange(registers), indexing="ij")
    row_of = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    key_of = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    for (row, key, seqlen_q, seqlen_k), result in zip(cases, results, strict=True):
        for causal in (False, True):
            visible = sees(row + torch.arange(64), key + torch.arange(wrappers.COLUMNS), seqlen_q, seqlen_k, causal)
            expected = torch.where(visible[row_of, key_of], register.float(), -INF)
            assert torch.equal(result[int(causal)], expected), f"{row=} {key=} {seqlen_q=} {seqlen_k=} {causal=}"


# tiles --------------------------------------------------------------------------------------------


@functools.cache
def schedules() -> list[tuple[tuple[int, int, int, int, int], bool, list[tuple[int, int, int]]]]:
    """((m_blocks, heads, batch, section, levels), longest first, [(m_block, head, batch index) of each tile])."""
    sizes = [
        (m_blocks, heads, batch, section, levels)
        for m_blocks in (1, 2, 5)
        for heads in (1, 2, 6, 8)
        for batch in (1, 3)
        for section in range(1, heads * batch + 3)
        for levels in range(1, m_blocks + 1)
    ]
    sizes += [(33, 24, 2, 7, 33), (33, 24, 2, 7, 4), (17, 32, 4, 24, 5), (1, 128, 9, 100, 1)]
    counts = [m_blocks * heads * batch for m_blocks, heads, batch, _, _ in sizes]
    starts = [0, *itertools.accumulate(counts)]
    cases = [(*size, start) for size, start in zip(sizes, starts, strict=False)]
    results = ints(starts[-1], 2, 3)
    call(wrappers.places_of_tiles, torch.tensor(cases, dtype=torch.int32), results, len(cases))
    return [
        (size, bool(order), [tuple(tile) for tile in results[start : start + count, order].tolist()])
        for size, start, count in zip(sizes, starts, counts, strict=False)
        for order in (0, 1)
    ]


def phase_of_tile(m_block: int, m_blocks: int, levels: int, longest_first: bool) -> int:
    return (m_blocks - 1 - m_block if longest_first else m_block) // levels


def test_tiles_are_numbered_one_to_one():
    for (m_blocks, heads, batch, section, levels), _, work in schedules():
        every = itertools.product(range(m_blocks), range(heads), range(batch))
        assert sorted(work) == sorted(every), (m_blocks, heads, batch, section, levels)


def test_phases_come_one_after_the_other_and_in_each_the_sections_of_heads():
    for (m_blocks, heads, _, section, levels), longest_first, work in schedules():
        places = [
            (phase_of_tile(m_block, m_blocks, levels, longest_first), (batch_index * heads + head) // section)
            for m_block, head, batch_index in work
        ]
        assert places == sorted(places)


def test_longest_tiles_of_a_section_start_first_under_a_causal_mask():
    for (m_blocks, heads, _, section, levels), longest_first, work in schedules():
        by_section: dict[tuple[int, int], list[int]] = {}
        for m_block, head, batch_index in work:
            phase = phase_of_tile(m_block, m_blocks, levels, longest_first)
            by_section.setdefault((phase, (batch_index * heads + head) // section), []).append(m_block)
        for (phase, _), order in by_section.items():
            assert order == sorted(order, reverse=longest_first)
            assert order[0] == (m_blocks - 1 - phase * levels if longest_first else phase * levels)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_heads_that_share_keys_and_values_run_side_by_side(group):
    tried = 0
    for (m_blocks, heads, batch, section, _), _, work in schedules():
        if heads % group or section % group:
            continue
        tried += 1
        shared = [(m_block, batch_index, head // group) for m_block, head, batch_index in work]
        runs = [(key, len(list(same))) for key, same in itertools.groupby(shared)]
        assert len(runs) == m_blocks * batch * heads // group
        assert all(length == group for _, length in runs)
    assert tried >= 10


# barriers -----------------------------------------------------------------------------------------


def ring(first: int, count: int) -> Tensor:
    results = ints(len(wrappers.STAGES), count, 2)
    call(wrappers.ring, results, first, count)
    return results


def test_a_tile_passes_its_barrier_after_its_own_round_and_not_before():
    for stages, positions in zip(wrappers.STAGES, ring(0, 40).tolist(), strict=True):
        # Completed rounds of each stage's barrier. A wait for a parity passes when the last completed round,
        # counted from 0, has that parity; a fresh barrier passes for as odd a round as the one before 0.
        rounds = [0] * stages
        for position, (stage, phase) in enumerate(positions):
            assert stage == position % stages
            assert (rounds[stage] - 1) % 2 == 1 - phase, "the loader may fill a stage that has been released"
            assert (rounds[stage] - 1) % 2 != phase, "a consumer waits as long as the tile has not arrived"
            rounds[stage] += 1
            assert (rounds[stage] - 1) % 2 == phase, "a consumer goes on when the tile has arrived"


def test_stages_keep_their_order_beyond_the_signed_integers():
    first, count = 2**31 - 20, 40
    for stages, positions in zip(wrappers.STAGES, ring(first, count).tolist(), strict=True):
        assert positions == [[p % stages, p // stages % 2] for p in range(first, first + count)]


def test_named_barriers_of_all_warpgroups_are_distinct_and_exist():
    groups = max(forward.REGISTERS)
    numbers = [first + group for first in NamedBarrier for group in range(groups)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 1
    assert max(numbers) <= 15


# softmax: maxima and limits -----------------------------------------------------------------------


def score_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of rows with their references and margins, (count, 2, ROW_VALUES) and twice (count, 2)."""
    shape = (2000, 2, wrappers.ROW_VALUES)
    magnitude = 10.0 ** torch.empty(shape[0], 1, 1).uniform_(-4, 4)
    shift = torch.empty(shape[0], 2, 1).uniform_(-3, 3)
    scores = (torch.randn(shape) + shift) * magnitude
    scores[:300] = -scores[:300].abs()
    # Special values: alone in ordinary rows, and rows of nothing else.
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, NAN, 1e-45, -1e-45, 3e38, -3e38])
    special[5] = NEGATIVE_NAN
    for i in range(200, 800):
        scores[i, i % 2, i % shape[2]] = special[i % len(special)]
    for i in range(1000, 1200):
        scores[i] = special[torch.randint(len(special), shape[1:])]
    scores[1200:1220] = -INF
    scores[1220:1240] = -0.0  # its bits are the lowest integer

    reference = (torch.randn(shape[:2]) + shift[..., 0]) * magnitude[..., 0]
    margin = 8.0 / torch.empty(shape[:2]).uniform_(0.01, 1.0)
    margin[::7] = 0.0
    for i in range(0, shape[0], 5):
        # A reference is never NaN.
        reference[i, i // 5 % 2] = special[i // 5 % 4]
    reference[1200:1240] = -INF
    # Scores at the limit and next to it.
    limit = reference + margin
    for i in range(1300, 1400):
        scores[i] = -scores[i].abs() * 1e3
        at = limit[i, i % 2]
        scores[i, i % 2, i % shape[2]] = (at, at.nextafter(at.new_tensor(INF)), at.nextafter(at.new_tensor(-INF)))[
            i % 3
        ]
    return scores.contiguous(), reference, margin


@functools.cache
def maxima() -> dict[str, Tensor]:
    torch.manual_seed(0)
    scores, reference, margin = score_rows()
    count = len(scores)
    bits, largest, limit, exceeds = ints(count, 2), floats(count, 2), ints(count, 2), ints(count)
    call(wrappers.row_maxima, scores, reference, margin, bits, largest, limit, exceeds, count)
    return {
        "scores": scores,
        "reference": reference,
        "margin": margin,
        "bits": bits,
        "largest": largest,
        "limit": limit,
        "exceeds": exceeds,
    }


def test_integer_row_max_is_the_largest_of_the_bits():
    row = maxima()
    assert torch.equal(row["bits"], bits_of(row["scores"]).amax(2))


def test_integer_row_max_is_the_float_max_wherever_that_is_not_negative():
    row = maxima()
    largest = row["scores"].amax(2)
    usable = (largest >= 0) & ~row["scores"].isnan().any(2) & (row["scores"] > 0).any(2)
    assert usable.sum() > 1000
    assert torch.equal(row["bits"].view(torch.float32)[usable], largest[usable])


def test_float_row_max_is_right_for_every_sign_and_ignores_nan():
    row = maxima()
    expected = torch.maximum(row["scores"].nan_to_num(-INF, INF, -INF).amax(2), row["reference"])
    assert (expected < 0).sum() > 100
    assert torch.equal(row["largest"], expected)


def test_a_limit_is_positive_or_one_that_every_score_reaches():
    row = maxima()
    limit = row["reference"] + row["margin"]
    expected = torch.where(limit > 0, bits_of(limit), softmax.LOWEST)
    assert (limit > 0).any()
    assert (limit <= 0).any()
    assert torch.equal(row["limit"], expected)
    reached = (limit <= 0).any(1)
    assert (row["exceeds"][reached] == 1).all()


def test_a_score_beyond_its_limit_is_never_missed():
    row = maxima()
    beyond = (row["scores"] > (row["reference"] + row["margin"])[..., None]).any(2).any(1)
    assert 100 < beyond.sum() < len(beyond) - 100
    assert (row["exceeds"][beyond] == 1).all()


def test_references_move_in_vain_only_for_limits_not_positive_equal_scores_and_nan():
    row = maxima()
    limit = (row["reference"] + row["margin"])[..., None]
    beyond = row["scores"] > limit
    excused = (limit <= 0) | (row["scores"] == limit) | row["scores"].isnan()
    must_stay = ~(beyond | excused).any(2).any(1)
    assert must_stay.sum() > 100
    assert (row["exceeds"][must_stay] == 0).all()


# softmax: arithmetic ------------------------------------------------------------------------------


@functools.cache
def arithmetic() -> dict[str, Tensor]:
    torch.manual_seed(0)
    count = 200
    rows = 20 * torch.randn(count, 2, wrappers.ROW_VALUES)
    rows[torch.rand_like(rows) < 0.05] = -INF
    rows[:5] = -INF
    scale, offset = torch.rand(count, 2), 10 * torch.randn(count, 2)
    exponentials, total, scaled = floats(*rows.shape), floats(count, 2), floats(*rows.shape)
    call(wrappers.row_arithmetic, rows, scale, offset, exponentials, total, scaled, count)
    return {
        "rows": rows,
        "scale": scale,
        "offset": offset,
        "exponentials": exponentials,
        "total": total,
        "scaled": scaled,
    }


def test_exponentiate_takes_one_row_and_turns_masked_scores_into_zero():
    given = arithmetic()
    rows, result = given["rows"], given["exponentials"]
    expected = torch.exp2(rows.double() * given["scale"][..., None] - given["offset"][..., None]).float()
    assert (result[:, 0][rows[:, 0] == -INF] == 0).all()
    torch.testing.assert_close(result[:, 0], expected[:, 0], rtol=2e-5, atol=0)
    assert torch.equal(result[:, 1], rows[:, 1])


def test_row_sum_adds_every_value_of_the_row():
    given = arithmetic()
    torch.testing.assert_close(given["total"], given["rows"].double().sum(2).float(), rtol=1e-5, atol=1e-4)


def test_scale_rows_multiplies_each_row_by_its_own_factor():
    given = arithmetic()
    assert torch.equal(given["scaled"], given["rows"] * given["scale"][..., None])


# softmax: the whole recurrence --------------------------------------------------------------------


class Result:
    """Online softmax of scores (count, tile, 2, ROW_VALUES) and its oracle in float64."""

    def __init__(self, scores: Tensor, softmax_scale: float = 0.125, threshold: float = 8.0):
        count, tiles = scores.shape[:2]
        values = torch.randn(count, tiles, wrappers.ROW_VALUES, wrappers.OUTPUT_VALUES)
        self.out, self.lse = floats(count, 2, wrappers.OUTPUT_VALUES), floats(count, 2)
        self.moved, self.largest = ints(count, tiles), floats(count, tiles, 2)
        results = (self.out, self.lse, self.moved, self.largest)
        call(wrappers.online_softmax, scores, values, *results, count, tiles, softmax_scale, constants=(threshold,))

        rows = scores.double().transpose(1, 2).flatten(2) * softmax_scale
        # Each lane of the quad holds the same scores: every key counts four times.
        self.expected_lse = rows.logsumexp(2) + math.log(4)
        probabilities = rows.softmax(2).where((rows != -INF).any(2, keepdim=True), 0.0)
        self.expected_out = probabilities @ values.double().flatten(1, 2)

    def assert_right(self, tolerance: float = 1e-5) -> None:
        kwargs = {"rtol": tolerance, "atol": tolerance, "check_dtype": False, "equal_nan": True}
        torch.testing.assert_close(self.out, self.expected_out, **kwargs)
        torch.testing.assert_close(self.lse, self.expected_lse, **kwargs)


def random_scores(count: int = 100, tiles: int = 6) -> Tensor:
    return 10 * torch.randn(count, tiles, 2, wrappers.ROW_VALUES)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("softmax_scale", [0.01, 0.125, 1.0])
def test_online_softmax_is_the_softmax_of_all_tiles(threshold, softmax_scale):
    Result(random_scores(), softmax_scale, threshold).assert_right(2e-5)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("step", [-60.0, 60.0])
def test_maxima_that_rise_or_fall_from_tile_to_tile_are_followed(threshold, step):
    scores = random_scores() + step * torch.arange(6)[:, None, None]
    Result(scores, threshold=threshold).assert_right(2e-5)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_rows_of_negative_scores_only_are_exact(threshold):
    Result(-random_scores().abs() - 1000, threshold=threshold).assert_right(1e-4)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_scores_of_ten_thousand_do_not_overflow(threshold):
    scores = 1e4 * (2 * torch.rand(100, 6, 2, wrappers.ROW_VALUES) - 1)
    result = Result(scores, 1.0, threshold)
    # A float32 offset of 1e4 in log2 units is rounded by up to 5e-4, and so are the products.
    result.assert_right(4e-3)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_masked_tiles_before_between_and_after_the_visible_ones_change_nothing(threshold):
    scores = random_scores(64)
    for i in range(64):
        for tile in range(6):
            if i >> tile & 1:
                scores[i, tile, 0] = -INF
        scores[i, : i % 6, 1] = -INF
    scores[torch.rand_like(scores) < 0.1] = -INF
    result = Result(scores, threshold=threshold)
    assert (result.expected_lse == -INF).any()
    result.assert_right(2e-5)


def test_a_row_without_keys_gives_zero_and_minus_infinity():
    scores = random_scores(8)
    scores[:, :, 1] = -INF
    result = Result(scores)
    assert (result.out[:, 1] == 0).all()
    assert (result.lse[:, 1] == -INF).all()
    assert result.lse[:, 0].isfinite().all()
    result.assert_right()


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [INF, NAN, NEGATIVE_NAN], ids=["inf", "nan", "negative-nan"])
def test_nan_and_infinity_in_one_row_spoil_that_row_and_no_other(value, row):
    scores = random_scores(60)
    for i in range(60):
        scores[i, i % 6, row, i % wrappers.ROW_VALUES] = value
    spoilt = Result(scores)
    assert spoilt.out[:, row].isnan().all()
    # The true log of a sum with exp(inf) is inf; NaN is as good a warning.
    assert not spoilt.lse[:, row].isfinite().any()
    other = 1 - row
    torch.testing.assert_close(spoilt.out[:, other].double(), spoilt.expected_out[:, other], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(spoilt.lse[:, other].double(), spoilt.expected_lse[:, other], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_spoilt_tile_of_the_output_leaves_nothing_in_the_next_one(value):
    scores = random_scores(60)
    scores[::2] = value
    result = Result(scores)
    assert result.out[::2].isnan().all()
    torch.testing.assert_close(result.out[1::2].double(), result.expected_out[1::2], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(result.lse[1::2].double(), result.expected_lse[1::2], rtol=2e-5, atol=2e-5)


def test_references_stay_within_the_threshold_and_move_beyond_it():
    softmax_scale = 0.5
    # Scores that raise the exponent by this many powers of two over a reference of 3.
    rises = [2.0, 7.9, 8.1, 40.0]
    scores = torch.full((len(rises), 3, 2, wrappers.ROW_VALUES), -5.0)
    scores[:, 0, :, 2] = 3.0
    for i, rise in enumerate(rises):
        scores[i, 1, i % 2, 5] = 3.0 + rise / (softmax_scale * softmax.LOG2_E)
    result = Result(scores, softmax_scale)
    assert result.moved.tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0]]
    result.assert_right()


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_probabilities_never_exceed_two_to_the_threshold(threshold):
    scores = random_scores(200) + 30 * torch.randn(200, 6, 1, 1)
    result = Result(scores, threshold=threshold)
    assert result.largest.max() <= 2**threshold * 1.0001
    if threshold:
        assert result.largest.max() > 2 ** (threshold - 2), "the threshold is made use of"


def test_no_reference_moves_after_the_first_tile_when_no_score_rises():
    scores = random_scores() * torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.5])[:, None, None]
    scores[:, 0, :, 0] = 60.0
    assert Result(scores).moved.tolist() == [[1, 0, 0, 0, 0, 0]] * len(scores)
