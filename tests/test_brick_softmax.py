"""The online softmax, compiled for the host and run on the CPU, against its definition in float64."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import softmax_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3.kernels.parts import softmax  # noqa: E402
from softmax_wrappers import ROW_VALUES  # noqa: E402

INF, NAN = math.inf, math.nan

#: Its sign bit is set, so as an integer it is below every number that is not negative.
NEGATIVE_NAN = torch.tensor(-(2**22), dtype=torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


# softmax: maxima and limits -----------------------------------------------------------------------


def score_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of rows with their references and margins, (count, 2, ROW_VALUES) and twice (count, 2)."""
    shape = (2000, 2, ROW_VALUES)
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
    rows = 20 * torch.randn(count, 2, ROW_VALUES)
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
    """Online softmax of scores (count, tile, 2, ROW_VALUES), with sinks (count, 2) or none, and its float64 oracle."""

    def __init__(
        self, scores: Tensor, softmax_scale: float = 0.125, threshold: float = 8.0, sinks: Tensor | None = None
    ):
        count, tiles = scores.shape[:2]
        values = torch.randn(count, tiles, ROW_VALUES, wrappers.OUTPUT_VALUES)
        self.out, self.lse = floats(count, 2, wrappers.OUTPUT_VALUES), floats(count, 2)
        self.moved, self.largest = ints(count, tiles), floats(count, tiles, 2)
        results = (self.out, self.lse, self.moved, self.largest)
        # Without sinks the table of them is not read.
        given = floats(count, 2) if sinks is None else sinks
        arguments = (scores, values, given, *results, count, tiles, softmax_scale)
        call(wrappers.online_softmax, *arguments, constants=(threshold, sinks is not None))

        # Each lane of the quad holds the same scores: every key counts four times.
        rows = scores.double().transpose(1, 2).flatten(2) * softmax_scale + math.log(4)
        logits = rows if sinks is None else torch.cat([rows, sinks.double()[..., None]], dim=2)
        self.expected_lse = logits.logsumexp(2)
        probabilities = (rows - self.expected_lse[..., None]).exp().where(rows != -INF, 0.0)
        self.expected_out = probabilities @ values.double().flatten(1, 2)

    def assert_right(self, tolerance: float = 1e-5) -> None:
        kwargs = {"rtol": tolerance, "atol": tolerance, "check_dtype": False, "equal_nan": True}
        torch.testing.assert_close(self.out, self.expected_out, **kwargs)
        torch.testing.assert_close(self.lse, self.expected_lse, **kwargs)


def random_scores(count: int = 100, tiles: int = 6) -> Tensor:
    return 10 * torch.randn(count, tiles, 2, ROW_VALUES)


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
    scores = 1e4 * (2 * torch.rand(100, 6, 2, ROW_VALUES) - 1)
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
        scores[i, i % 6, row, i % ROW_VALUES] = value
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
    scores = torch.full((len(rises), 3, 2, ROW_VALUES), -5.0)
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


# sinks --------------------------------------------------------------------------------------------


def scores_of_all_kinds() -> Tensor:
    """Scores of which some rows have no key, and some a few."""
    scores = random_scores(400)
    scores[torch.rand_like(scores) < 0.3] = -INF
    scores[::5, :, 1] = -INF
    return scores


@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_a_sink_is_a_further_logit_without_a_value(size, threshold):
    sinks = size * torch.randn(400, 2)
    result = Result(scores_of_all_kinds(), threshold=threshold, sinks=sinks)
    assert result.expected_lse.isfinite().all()
    result.assert_right(2e-5)


def test_a_sink_far_above_takes_all_and_one_far_below_nothing():
    scores = random_scores(64)
    above = Result(scores, sinks=torch.full((64, 2), 3e4))
    assert (above.out == 0).all()
    torch.testing.assert_close(above.lse, torch.full((64, 2), 3e4))
    below, without = Result(scores, sinks=torch.full((64, 2), -3e4)), Result(scores)
    assert torch.equal(below.lse, without.lse)
    below.assert_right()


# 3e38 is beyond float32 in log2 units.
@pytest.mark.parametrize("size", [2e38, 3e38, INF])
def test_a_sink_without_bounds_leaves_nothing_but_itself(size):
    result = Result(scores_of_all_kinds(), sinks=torch.full((400, 2), size))
    assert (result.out == 0).all()
    assert (result.lse > 1e38).all()
    assert (result.lse == INF).all() or size < INF


def test_a_sink_of_minus_infinity_is_none():
    scores = scores_of_all_kinds()
    torch.manual_seed(1)
    without = Result(scores)
    torch.manual_seed(1)
    with_it = Result(scores, sinks=torch.full((400, 2), -INF))
    assert torch.equal(with_it.out, without.out)
    assert torch.equal(with_it.lse, without.lse)
    assert (with_it.lse == -INF).any()


def test_a_row_without_keys_gives_zero_and_its_sink():
    scores = torch.full((50, 3, 2, ROW_VALUES), -INF)
    sinks = 100 * torch.randn(50, 2)
    result = Result(scores, sinks=sinks)
    assert (result.out == 0).all()
    torch.testing.assert_close(result.lse, sinks, rtol=1e-6, atol=0)


def test_a_sink_that_is_nan_spoils_its_row_and_no_other():
    scores = scores_of_all_kinds()
    sinks = torch.randn(400, 2)
    sinks[:, 0] = NAN
    result = Result(scores, sinks=sinks)
    assert result.lse[:, 0].isnan().all()
    assert result.out[:, 0].isnan().all()
    torch.testing.assert_close(result.lse[:, 1].double(), result.expected_lse[:, 1], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(result.out[:, 1].double(), result.expected_out[:, 1], rtol=2e-5, atol=2e-5)


def test_sinks_do_not_hide_what_is_wrong_with_the_scores():
    scores = random_scores(60)
    scores[:, 2, 0, 3] = NAN
    result = Result(scores, sinks=torch.full((60, 2), 1e3))
    assert result.out[:, 0].isnan().all()
    assert result.lse[:, 0].isnan().all()
    assert result.lse[:, 1].isfinite().all()
