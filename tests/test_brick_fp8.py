"""The bricks of FP8 attention, compiled for the host and run on the CPU: softmax, scales, registers, transposition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import fp8_wrappers as wrappers  # noqa: E402
import matrices_on_host  # noqa: E402
from brick_wrappers import ROW_VALUES  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3.e4m3 import KEY_OF_SLOT  # noqa: E402
from fa3.fp8_tiles import FP8_SMALL, FP8_TILES  # noqa: E402
from fa3.kernels.parts import copies, scaled_softmax, scales, transpose  # noqa: E402
from fa3.quantization import E4M3  # noqa: E402
from fa3.spec import WGMMA_ROWS  # noqa: E402

INF, NAN = math.inf, math.nan
LOG2_E = math.log2(math.e)

#: Thresholds of specs: that of the plan, and none.
THRESHOLDS = (0.8, 0.0)

LARGEST = 448.0


# Softmax ----------------------------------------------------------------------------------------------------------


class Result:
    """Scaled softmax of scores (count, tile, 2, ROW_VALUES), and its float64 oracle.

    ``scales_of_tiles`` (count, tile, 4): the scales of q, k and v, and the largest of v; ones if left out. Without
    ``blocks`` the scales of the first tile are those of all.
    """

    def __init__(
        self,
        scores: Tensor,
        scales_of_tiles: Tensor | None = None,
        softmax_scale: float = 0.125,
        threshold: float = 0.8,
        sinks: Tensor | None = None,
        blocks: bool | None = None,
    ):
        count, tiles = scores.shape[:2]
        blocks = scales_of_tiles is not None if blocks is None else blocks
        of_tiles = torch.ones(count, tiles, 4) if scales_of_tiles is None else scales_of_tiles
        values = torch.randn(count, tiles, ROW_VALUES, wrappers.OUTPUT_VALUES)
        self.out, self.lse = floats(count, 2, wrappers.OUTPUT_VALUES), floats(count, 2)
        self.probabilities, states = floats(*scores.shape), floats(count, tiles, 2, 4)
        results = (self.out, self.lse, self.probabilities, states)
        # Without sinks the table of them is not read.
        given = floats(count, 2) if sinks is None else sinks
        arguments = (scores, values, of_tiles, given, *results, count, tiles, softmax_scale)
        call(wrappers.scaled_softmax_of_tiles, *arguments, constants=(threshold, blocks, sinks is not None))
        self.offset, self.reference, self.factor, self.moved = states.unbind(3)

        self.shares = (of_tiles[..., 2] / of_tiles[..., 3]).clamp_min(scales.LEAST_SHARE)[..., None, None]
        # Scores in log2 units, as the probabilities take them.
        factors = (of_tiles[..., 0] * of_tiles[..., 1])[..., None, None].double()
        self.logits = scores.double() * factors * softmax_scale * LOG2_E
        # Each lane of the quad holds the same scores: every key counts four times.
        rows = self.logits.transpose(1, 2).flatten(2) / LOG2_E + math.log(4)
        with_sink = rows if sinks is None else torch.cat([rows, sinks.double()[..., None]], dim=2)
        self.expected_lse = with_sink.logsumexp(2)
        weights = (rows - self.expected_lse[..., None]).exp().where(rows != -INF, 0.0)
        scaled_values = values.double() * of_tiles[..., 2].double()[..., None, None]
        self.expected_out = weights @ scaled_values.flatten(1, 2)

    def assert_right(self, tolerance: float = 2e-5) -> None:
        kwargs = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
        torch.testing.assert_close(self.lse, self.expected_lse, **kwargs)
        size = self.expected_out.abs().amax().item() or 1.0
        torch.testing.assert_close(self.out / size, self.expected_out / size, **kwargs)


def random_scores(count: int = 100, tiles: int = 6) -> Tensor:
    return 10 * torch.randn(count, tiles, 2, ROW_VALUES)


def random_scales(count: int = 100, tiles: int = 6, span: float = 8.0) -> Tensor:
    """Scales of blocks: that of q is one for all tiles, those of k change, those of v are powers of two."""
    spread = span ** (2 * torch.rand(count, tiles, 4) - 1)
    spread[..., 0] = spread[:, :1, 0]
    spread[..., 2] = torch.exp2(torch.randint(-6, 3, (count, tiles)).float())
    spread[..., 3] = spread[..., 2].amax(1, keepdim=True)
    return spread


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("softmax_scale", [0.01, 0.125, 1.0])
def test_softmax_in_log2_units_is_the_softmax_of_all_tiles(softmax_scale, threshold):
    Result(random_scores(), None, softmax_scale, threshold).assert_right()


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("blocks", [False, True])
def test_one_scale_a_head_multiplies_scores_and_output(blocks, threshold):
    scores, softmax_scale = random_scores(), 0.125
    q_scale, k_scale, v_scale = 0.37, 1.9, 0.0625
    plain = Result(scores * q_scale * k_scale, None, softmax_scale, threshold)
    of_tiles = torch.tensor([q_scale, k_scale, v_scale, v_scale]).expand(*scores.shape[:2], 4).contiguous()
    scaled = Result(scores, of_tiles, softmax_scale, threshold, blocks=blocks)
    scaled.assert_right()
    torch.testing.assert_close(scaled.lse, plain.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("span", [1.5, 30.0])
def test_factors_and_shares_that_change_from_tile_to_tile_are_those_of_each_tile(span, threshold):
    result = Result(random_scores(), random_scales(span=span), threshold=threshold)
    assert (result.moved[:, 1:] == 1).any()
    assert (result.moved[:, 1:] == 0).any()
    result.assert_right(1e-4 if span > 2 else 2e-5)


@pytest.mark.parametrize("step", [-60.0, 60.0])
def test_maxima_that_rise_or_fall_from_tile_to_tile_are_followed(step):
    scores = random_scores() + step * torch.arange(6)[:, None, None]
    Result(scores, random_scales(span=1.2)).assert_right(1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_rows_of_negative_scores_only_are_exact(blocks):
    result = Result(-random_scores().abs() - 1000, random_scales(span=1.5) if blocks else None)
    # A limit that is not positive makes the warp look at every tile.
    assert (result.moved == 1).all()
    assert (result.reference < 0).all()
    result.assert_right(2e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_masked_tiles_before_between_and_after_the_visible_ones_change_nothing(blocks):
    scores = random_scores(64)
    for i in range(64):
        for tile in range(6):
            if i >> tile & 1:
                scores[i, tile, 0] = -INF
        scores[i, : i % 6, 1] = -INF
    scores[torch.rand_like(scores) < 0.1] = -INF
    result = Result(scores, random_scales(64) if blocks else None)
    assert (result.expected_lse == -INF).any()
    assert (result.probabilities[scores == -INF] == 0).all()
    result.assert_right(1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_row_without_keys_gives_zero_and_minus_infinity(blocks):
    scores = random_scores(8)
    scores[:, :, 1] = -INF
    result = Result(scores, random_scales(8) if blocks else None)
    assert (result.out[:, 1] == 0).all()
    assert (result.lse[:, 1] == -INF).all()
    assert (result.reference[:, :, 1] == -INF).all()
    assert result.lse[:, 0].isfinite().all()


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("blocks", [False, True])
def test_no_probability_exceeds_the_largest_number_of_e4m3_times_its_share(blocks, threshold):
    scores = random_scores(200) + 30 * torch.randn(200, 6, 1, 1)
    result = Result(scores, random_scales(200) if blocks else None, threshold=threshold)
    relative = result.probabilities / result.shares
    assert relative.max() <= LARGEST * 1.0002
    if threshold:
        assert relative.max() > LARGEST / 2, "the room is made use of"


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_where_a_reference_moves_the_largest_probability_is_a_power_of_two(threshold):
    scores = random_scores(200) + 20 * torch.arange(6)[:, None, None]
    result = Result(scores, threshold=threshold)
    largest = result.probabilities.amax(3).to(E4M3).float()
    # A row of a warp that moves need not be the one beyond its limit.
    moves = result.offset != torch.cat([torch.full_like(result.offset[:, :1], NAN), result.offset[:, :-1]], dim=1)
    assert (largest[:, 0] == 32.0).all()
    assert moves[:, 1:].sum() > 500
    assert (largest[:, 1:][moves[:, 1:]] == 256.0).all()


def test_a_row_that_is_not_beyond_its_limit_keeps_offset_and_factor_when_the_other_moves():
    scores = random_scores(200)
    scores[:, 0, 1] += 40.0
    scores[:, 1:, 0] += 60.0 * torch.arange(1, 6)[:, None]
    result = Result(scores)
    limit = result.reference
    beyond = result.logits.amax(3)[:, 1:] > limit[:, :-1]
    others = (result.moved[:, 1:] == 1) & ~beyond
    assert others.sum() > 500
    assert torch.equal(result.offset[:, 1:][others], result.offset[:, :-1][others])
    assert torch.equal(limit[:, 1:][others], limit[:, :-1][others])
    assert (result.factor[:, 1:][others] == 1.0).all()
    assert (result.factor[:, 1:][beyond] < 1.0).all()
    result.assert_right(1e-4)


def test_the_first_tile_leaves_room_for_larger_scores_and_later_ones_less():
    # Scores that are so many powers of two above the largest of the tile before.
    room = scaled_softmax.ROOM - math.floor(scaled_softmax.ROOM - scaled_softmax.FIRST_THRESHOLD)
    later = scaled_softmax.ROOM - math.floor(scaled_softmax.ROOM - 0.8)
    assert room == pytest.approx(math.log2(LARGEST / 32))
    assert later == pytest.approx(math.log2(LARGEST / 256))
    rises = [(0.99 * room, 0.0), (1.01 * room, 0.99 * later), (1.01 * room, 1.01 * later)]
    moved = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    softmax_scale = 0.5
    scores = torch.full((len(rises), 3, 2, ROW_VALUES), -5.0)
    for i, (first, second) in enumerate(rises):
        tops = (3.0, 3.0 + first / (softmax_scale * LOG2_E), 3.0 + (first + second) / (softmax_scale * LOG2_E))
        for tile, top in enumerate(tops):
            scores[i, tile, i % 2, tile] = top
    result = Result(scores, None, softmax_scale)
    # The row beside it has negative scores only, but a limit above 0: it does not make the warp move.
    assert (result.reference > 0).all()
    assert result.moved[:, :, 0].int().tolist() == moved
    result.assert_right()


def test_limits_are_those_of_the_factor_of_the_tile():
    # The same scores, whose factor is 6 times as large in the second tile: they are beyond the limit there alone.
    scores = torch.full((1, 3, 2, ROW_VALUES), 1.0)
    of_tiles = torch.ones(1, 3, 4)
    of_tiles[0, 1, 1] = 6.0
    result = Result(scores, of_tiles, softmax_scale=1.0)
    assert result.moved[0, :, 0].int().tolist() == [1, 1, 0]
    result.assert_right()


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [INF, NAN])
def test_nan_and_infinity_in_one_row_spoil_that_row_and_no_other(value, row):
    scores = random_scores(60)
    for i in range(60):
        scores[i, i % 6, row, i % ROW_VALUES] = value
    spoilt = Result(scores)
    assert spoilt.out[:, row].isnan().all()
    assert not spoilt.lse[:, row].isfinite().any()
    other = 1 - row
    torch.testing.assert_close(spoilt.lse[:, other].double(), spoilt.expected_lse[:, other], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(spoilt.out[:, other].double(), spoilt.expected_out[:, other], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_a_sink_is_a_further_logit_without_a_value(size):
    scores = random_scores()
    scores[::5, :, 1] = -INF
    Result(scores, random_scales(), sinks=size * torch.randn(100, 2)).assert_right(1e-4)


# Scales -----------------------------------------------------------------------------------------------------------


def factors_of(*rows: tuple[float, float, float, float]) -> Tensor:
    given, out = torch.tensor(rows), floats(len(rows), 4)
    call(wrappers.factors_of_scales, given, out, len(rows))
    return out


def test_the_factor_of_scores_is_the_product_of_their_scales_kept_in_bounds():
    pairs = ((0.5, 3.0), (1e-4, 1e-5), (0.0, 7.0), (1e-30, 1e-30), (1e30, 1e30), (INF, 1.0), (3e38, 2.0), (NAN, 1.0))
    factor = factors_of(*((q, k, 1.0, 1.0) for q, k in pairs))[:, 0]
    least, largest = scales.LEAST_FACTOR, scales.LARGEST_FACTOR
    expected = torch.tensor([1.5, 1e-9, least, least, largest, largest, largest, NAN])
    torch.testing.assert_close(factor, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_the_share_of_a_tile_is_its_scale_in_the_largest_of_the_head():
    scale = torch.exp2(torch.arange(-39.0, 1.0)).tolist()
    _, share, inverse, _ = factors_of(*((1.0, 1.0, 2.0 * x, 2.0) for x in scale)).T
    assert torch.equal(share, torch.arange(-39.0, 1.0))
    assert torch.equal(inverse, 1 / torch.tensor(scale))
    # A scale that is no number spoils what it scales.
    assert factors_of((1.0, 1.0, NAN, 2.0))[0, 1:3].isnan().all()


def test_shares_of_next_to_nothing_count_as_the_least_and_stay_finite():
    _, share, inverse, of_largest = factors_of(
        (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1e-30, 1e10), (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1e-38, 1e-38)
    ).T
    assert (share == math.log2(scales.LEAST_SHARE)).all()
    assert (inverse == 1 / scales.LEAST_SHARE).all()
    assert of_largest.tolist() == pytest.approx([1.0, 1e-10, 0.0, 0.0])


def test_scales_are_read_by_their_strides_and_are_one_where_there_are_none():
    batch, heads, blocks = 3, 4, 5
    # Other orders of dims than that of the numbers; a scale of v for a batch alone.
    q = torch.rand(heads, blocks, batch).permute(2, 0, 1)
    k = torch.rand(batch, blocks, 2 * heads).transpose(1, 2)[:, ::2]
    v = torch.rand(batch, 1, 1).expand(batch, heads, blocks)
    numbers = [n for x in (q, k, v) for n in (x.data_ptr(), *x.stride())] + [0, 7, 7, 7]
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.int32) for n in (batch, heads, blocks)))
    out = floats(len(places), 5)
    call(wrappers.scales_in_memory, torch.tensor(numbers), places, out, len(places), 128, 2)
    expected = torch.stack([x.reshape(-1) for x in (q, k, v, torch.ones(batch, heads, blocks), k)], dim=1)
    assert torch.equal(out, expected)


# Registers --------------------------------------------------------------------------------------------------------


def test_slots_of_v_are_the_keys_that_threads_hold():
    # Of 16 columns of an accumulator a thread of a quad holds two, and two that are 8 further on; as the A operand of
    # 8 bits it has four neighbours.
    held = [8 * group + 2 * thread + pair for thread in range(4) for group in range(2) for pair in range(2)]
    by_formula = [2 * t + j if j < 2 else 6 + 2 * t + j for t in range(4) for j in range(4)]
    assert list(KEY_OF_SLOT) == held == by_formula


def test_rounded_registers_are_the_operand_whose_slots_are_keys_in_the_order_of_v():
    rows, columns = WGMMA_ROWS, wrappers.ROUNDED_COLUMNS
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    # e4m3 holds 0 to 15 exactly: a place is told in four digits.
    found = []
    for digit in (row % 16, row // 16, column % 16, column // 16):
        words, operand = ints(128, columns // 8), ints(128, wrappers.STEP // 2)
        call(wrappers.rounded_registers, digit.float().contiguous(), words, operand)
        found.append(words.view(torch.uint8).view(E4M3).float().int())
    found_row, found_column = found[0] + 16 * found[1], found[2] + 16 * found[3]
    slot = operand // rows
    key = slot // 16 * 16 + torch.tensor(KEY_OF_SLOT)[slot.long() % 16]
    for step in range(columns // wrappers.STEP):
        of_step = slice(step * wrappers.STEP // 2, (step + 1) * wrappers.STEP // 2)
        assert torch.equal(found_row[:, of_step], operand % rows)
        assert torch.equal(found_column[:, of_step], (key + step * wrappers.STEP).int())


# Transposition ----------------------------------------------------------------------------------------------------

#: Of v tiles: those of every table, and more.
KEYS, COLUMNS = tuple(range(32, 257, 32)), (64, 96, 128, 192, 256)


def layout_of(rows: int, columns: int) -> Tensor:
    """(row, column): where bytes of a tile lie."""
    out = ints(rows, columns)
    call(wrappers.layout_of_tile, out, constants=(rows, columns))
    return out.long()


@pytest.mark.parametrize("run_time", [False, True], ids=["compile-time", "run-time"])
@pytest.mark.parametrize(("columns", "span"), [(32, 32), (96, 32), (64, 64), (192, 64), (128, 128), (256, 128)])
def test_places_by_hand_are_those_of_the_layout_of_tiles(columns, span, run_time):
    assert copies.swizzle_span(columns) == span
    for rows in (8, 64, 96):
        ours, theirs = ints(rows, columns // 16), ints(rows, columns // 16)
        call(wrappers.places_by_hand, ours, theirs, constants=(rows, columns, run_time))
        assert torch.equal(ours, theirs)
        assert sorted(ours.flatten().tolist()) == list(range(0, rows * columns, 16))


@pytest.mark.parametrize("columns", COLUMNS)
def test_three_warps_turn_every_element_of_a_tile_once_and_put_it_where_the_products_look(columns):
    for keys in KEYS:
        at_once = 2 if keys % 64 else 3
        calls = keys // transpose.KEYS * columns // transpose.COLUMNS
        loads, words, stores = matrices_on_host.tables(32 * transpose.WARPS, calls)
        constants = (keys, columns, at_once, calls)
        call(wrappers.transposed_tile, loads, words, stores, constants=constants)

        v = torch.randint(256, (keys, columns), dtype=torch.uint8)
        rows, target = torch.zeros(2, keys * columns, dtype=torch.uint8)
        rows[layout_of(keys, columns)] = v
        words = matrices_on_host.loaded(loads, rows)
        call(wrappers.transposed_tile, loads, words, stores, constants=constants)
        assert (matrices_on_host.stored(stores, target) == 1).all()

        # Of 16 columns the even ones come first.
        order = [first + 2 * i + odd for first in range(0, columns, 16) for odd in range(2) for i in range(8)]
        slots = [first + key for first in range(0, keys, 16) for key in KEY_OF_SLOT]
        turned = target[layout_of(columns, keys)]
        assert torch.equal(turned, v.T[order][:, slots])


def test_every_tile_that_the_tables_have_is_one_that_was_tried():
    kinds = ((kind, choice) for kind, uses in FP8_TILES.items() for both in uses.values() for _, choice in both[0])
    small = ((kind, both[0]) for kind, both in FP8_SMALL.items())
    tried = [(choice.tile_n, kind[1]) for kind, choice in (*kinds, *small) if choice.transpose_stages]
    assert len(tried) > 50
    assert all(keys in KEYS and columns in COLUMNS for keys, columns in tried)


@pytest.mark.parametrize("columns", sorted({*COLUMNS, *(columns // 2 for columns in COLUMNS if columns % 32 == 0)}))
def test_the_epilogue_puts_the_columns_of_the_output_back_in_order(columns):
    stores = matrices_on_host.tables(128, columns // 8)[2]
    call(wrappers.sorted_columns, stores, constants=(columns,))
    tile = torch.full((WGMMA_ROWS * columns * 2,), 255, dtype=torch.uint8)
    for thread in range(128):
        for place, *both, _, _ in stores[thread].tolist():
            assert place % 8 == 0
            tile[place : place + 8] = torch.tensor(both, dtype=torch.int32).view(torch.uint8)
    # A swizzle is one of bytes, whatever the elements.
    found = tile[layout_of(WGMMA_ROWS, 2 * columns)].view(torch.int16)
    row, column = torch.meshgrid(torch.arange(WGMMA_ROWS), torch.arange(columns), indexing="ij")
    # Accumulator column n of 16 is column 2 * n of the output, or 2 * (n - 8) + 1.
    accumulator = column // 16 * 16 + column % 2 * 8 + column % 16 // 2
    assert torch.equal(found.long(), row + WGMMA_ROWS * accumulator)
