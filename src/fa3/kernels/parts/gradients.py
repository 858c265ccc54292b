"""Probabilities and dS of transposed scores, in the registers of a thread.

Transposed scores have keys as rows and queries as columns, so what belongs to a query, its LSE and delta, belongs to
a column. The functions run over registers in the order of the accumulator (see `fa3.kernels.parts.layout`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from . import layout, ptx, scores


def column_of(index: int) -> int:
    """The thread's column, of its quarter of all, in which register ``index`` of an accumulator is."""
    return 2 * (index // 4) + index % 2


def row_of(index: int) -> int:
    """The thread's row, 0 or 1, in which register ``index`` of an accumulator is."""
    return index // 2 % 2


@cute.jit
def of_lane(statistics: cute.Tensor, lane: Int32) -> cute.Tensor:
    """The values of the thread's columns, (2, columns / 8), from shared memory."""
    groups = cute.size(statistics) // 8
    offset = cute.assume(layout.first_column(lane), divby=2)
    pairs = cute.make_tensor(statistics.iterator + offset, cute.make_layout((2, groups), stride=(1, 8)))
    values = cute.make_rmem_tensor(cute.make_layout((2, groups)), Float32)
    for group in cutlass.range_constexpr(groups):
        cute.autovec_copy(pairs[None, group], values[None, group])
    return values


@cute.jit
def round_group(values: cute.Tensor, group: cutlass.Constexpr, rounded: cute.Tensor, dtype: cutlass.Constexpr):
    """Round the four registers of a group of 8 columns into the operand of the next product."""
    pairs = cute.recast_tensor(cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Int32)
    for half in cutlass.range_constexpr(2):
        i = 4 * group + 2 * half
        pairs[i // 2] = ptx.pack_pair(values[i], values[i + 1], dtype)


@cute.jit
def exponentiate(
    values: cute.Tensor, scale_log2: Float32, lse: cute.Tensor, rounded: cute.Tensor, dtype: cutlass.Constexpr
):
    """Replace each score s by P = ``exp2(scale_log2 * s - lse)``, and round it; ``lse`` as `of_lane` returns it."""
    # Group after group, so that the LSE of all columns and the unrounded P are not kept at once.
    for group in cutlass.range_constexpr(cute.size(values) // 4):
        for i in cutlass.range_constexpr(4 * group, 4 * group + 4):
            values[i] = cute.math.exp2(values[i] * scale_log2 - lse[i % 2, group], fastmath=True)
        round_group(values, group, rounded, dtype)


@cute.jit
def modified(
    score_mod: cutlass.Constexpr,
    raw: cute.Tensor,
    factors: tuple[Float32, Float32],
    capped: cutlass.Constexpr,
    batch: Int32,
    head: Int32,
    keys: tuple[Int32, Int32],
    first_query: Int32,
    aux: tuple,
    result: cute.Tensor,
):
    """Scores after softcap and ``score_mod``; ``raw`` becomes what their derivatives are taken at.

    ``factors`` are those before the hyperbolic tangent and before ``score_mod`` (see `fa3.kernels.parts.work.Extras`).
    """
    tanh_factor, mod_factor = factors
    for i in cutlass.range_constexpr(cute.size(raw)):
        if const_expr(capped):
            raw[i] = scores.tanh(raw[i] * tanh_factor)
        if const_expr(score_mod is not None):
            query = first_query + Int32(layout.column_in_tile(column_of(i)))
            value = score_mod(raw[i] * mod_factor, batch, head, query, keys[row_of(i)], aux)
            result[i] = Float32(value)
        else:
            result[i] = raw[i]


@cute.jit
def hide(
    mask_mod: cutlass.Constexpr,
    values: cute.Tensor,
    batch: Int32,
    head: Int32,
    keys: tuple[Int32, Int32],
    first_query: Int32,
    aux: tuple,
):
    """Set scores to -inf where ``mask_mod`` says no."""
    for i in cutlass.range_constexpr(cute.size(values)):
        query = first_query + Int32(layout.column_in_tile(column_of(i)))
        seen = Boolean(mask_mod(batch, head, query, keys[row_of(i)], aux))
        values[i] = values[i] if seen else -Float32.inf


@cute.jit
def score_gradients(
    p: cute.Tensor,
    dp: cute.Tensor,
    delta: cute.Tensor,
    rounded: cute.Tensor,
    dtype: cutlass.Constexpr,
    derivative: cutlass.Constexpr,
    raw: cute.Tensor,
    mod_factor: Float32,
    capped: cutlass.Constexpr,
    batch: Int32,
    head: Int32,
    keys: tuple[Int32, Int32],
    first_query: Int32,
    aux: tuple,
):
    """Replace dP by dS = P * (dP - delta), and round it; ``delta`` as `of_lane` returns it.

    ``p`` is rounded: unrounded it would take twice the registers. With a ``score_mod`` or softcap, dS is that of the
    scores before them; ``raw`` as `modified` left it.
    """
    pairs = cute.recast_tensor(cute.make_tensor(p.iterator, cute.make_layout(cute.size(p))), Int32)
    dp = cute.make_tensor(dp.iterator, cute.make_layout(cute.size(dp)))
    raw = cute.make_tensor(raw.iterator, cute.make_layout(cute.size(raw)))
    for group in cutlass.range_constexpr(cute.size(dp) // 4):
        for i in cutlass.range_constexpr(4 * group, 4 * group + 4):
            dp[i] = ptx.unpack(pairs[i // 2], i % 2, dtype) * (dp[i] - delta[i % 2, group])
            if const_expr(derivative is not None):
                query = first_query + Int32(layout.column_in_tile(column_of(i)))
                score = raw[i] * mod_factor
                dp[i] = Float32(derivative(dp[i], score, batch, head, query, keys[row_of(i)], aux))
            if const_expr(capped):
                dp[i] = dp[i] * (1.0 - raw[i] * raw[i])
        round_group(dp, group, rounded, dtype)
