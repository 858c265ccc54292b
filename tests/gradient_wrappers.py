"""What the backward asks of masks and scores, as functions of the host: loops over cases that read and write tables.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from brick_wrappers import COLUMNS, WARPGROUP_THREADS, table
from fa3.kernels.parts import gradients, layout, mask, scores
from mask_bounds import KINDS

REGISTERS = COLUMNS // 2

# Masks, seen from a key -------------------------------------------------------------------------------------------


@cute.jit
def queries_of_keys(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 6: key, seqlen_q, seqlen_k, left, right, chunk) -> out (count, kind, 2: first query, end query)."""
    cases = table(cases_address, Int32, (count, 6))
    out = table(out_address, Int32, (count, len(KINDS), 2))
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 1], cases[i, 2], cases[i, 3], cases[i, 4], cases[i, 5])
        for kind in cutlass.range_constexpr(len(KINDS)):
            out[i, kind, 0] = bounds.first_query(cases[i, 0], KINDS[kind])
            out[i, kind, 1] = bounds.end_query(cases[i, 0], KINDS[kind])


@cute.jit
def tiles_of_keys(cases_address: Int64, out_address: Int64, count: Int32, tile_m: cutlass.Constexpr):
    """cases (count, 7: first and last key, seqlen_q, seqlen_k, left, right, chunk) -> out (count, kind, 4).

    The four are the first and one past the last query tile with a query that sees a key, and the same of whole tiles.
    """
    cases = table(cases_address, Int32, (count, 7))
    out = table(out_address, Int32, (count, len(KINDS), 4))
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 2], cases[i, 3], cases[i, 4], cases[i, 5], cases[i, 6])
        keys = cases[i, 0], cases[i, 1]
        for kind in cutlass.range_constexpr(len(KINDS)):
            needed = bounds.query_tiles(*keys, tile_m, KINDS[kind])
            whole = bounds.whole_query_tiles(*keys, tile_m, KINDS[kind])
            for n in cutlass.range_constexpr(2):
                out[i, kind, n] = needed[n]
                out[i, kind, 2 + n] = whole[n]


@cute.jit
def masked_tiles(cases_address: Int64, out_address: Int64, count: Int32, columns: cutlass.Constexpr):
    """cases (count, 7: first key, first query, seqlen_q, seqlen_k, left, right, chunk) -> out.

    out (count, kind, thread, register): register ``i`` of each thread holds the score ``i`` before the mask.
    """
    cases = table(cases_address, Int32, (count, 7))
    out = table(out_address, Float32, (count, len(KINDS), WARPGROUP_THREADS, columns // 2))
    values = cute.make_rmem_tensor(columns // 2, Float32)
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 2], cases[i, 3], cases[i, 4], cases[i, 5], cases[i, 6])
        for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
            lane = thread % 32
            key = cases[i, 0] + layout.first_row(thread // 32, lane)
            query = cases[i, 1] + layout.first_column(lane)
            for kind in cutlass.range_constexpr(len(KINDS)):
                for v in cutlass.range(cute.size(values), unroll_full=True):
                    values[v] = Float32(v)
                bounds.hide_queries(layout.rows_and_columns(values), (key, key + 8), query, KINDS[kind])
                for v in cutlass.range(cute.size(values), unroll_full=True):
                    out[i, kind, thread, v] = values[v]


# Scores -----------------------------------------------------------------------------------------------------------


@cute.jit
def read(values: cute.Tensor, source: cute.Tensor, thread: Int32):
    """The registers of a thread from a table (thread, register)."""
    for v in cutlass.range_constexpr(REGISTERS):
        values[v] = source[thread, v]


@cute.jit
def write_operand(rounded: cute.Tensor, target: cute.Tensor, thread: Int32):
    """Rounded registers of a thread to a table (thread, register) of float32."""
    flat = cute.make_tensor(rounded.iterator, cute.make_layout(REGISTERS))
    for v in cutlass.range_constexpr(REGISTERS):
        target[thread, v] = Float32(flat[v])


@cute.jit
def probabilities(
    scores_address: Int64,
    lse_address: Int64,
    out_address: Int64,
    rounded_address: Int64,
    scale_log2: Float32,
    dtype: cutlass.Constexpr,
):
    """scores (thread, register), lse (COLUMNS,) -> P (thread, register) in float32, and rounded."""
    given = table(scores_address, Float32, (WARPGROUP_THREADS, REGISTERS))
    out = table(out_address, Float32, (WARPGROUP_THREADS, REGISTERS))
    out_rounded = table(rounded_address, Float32, (WARPGROUP_THREADS, REGISTERS))
    lse = table(lse_address, Float32, (COLUMNS,))
    values = cute.make_rmem_tensor(REGISTERS, Float32)
    rounded = layout.make_probability_operand(COLUMNS, dtype)
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        read(values, given, thread)
        gradients.exponentiate(values, scale_log2, gradients.of_lane(lse, thread % 32), rounded, dtype)
        for v in cutlass.range_constexpr(REGISTERS):
            out[thread, v] = values[v]
        write_operand(rounded, out_rounded, thread)


@cute.jit
def times_place(
    grad: Float32, score: Float32, batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple
) -> Float32:
    """A derivative in which every argument has a say."""
    return grad * (score + Float32(q_index + 100 * kv_index + 1000 * head + 10_000 * batch))


@cute.jit
def chain(
    cases_address: Int64,
    scores_address: Int64,
    dp_address: Int64,
    delta_address: Int64,
    after_address: Int64,
    ds_address: Int64,
    count: Int32,
    tanh_factor: Float32,
    mod_factor: Float32,
    score_mod: cutlass.Constexpr,
    derivative: cutlass.Constexpr,
    mask_mod: cutlass.Constexpr,
    capped: cutlass.Constexpr,
):
    """cases (count, 4: first key, first query, batch, head); scores, dp (thread, register), delta (COLUMNS,).

    after (count, thread, register): scores after softcap, score_mod and mask_mod, each "" where there is none. ds (the
    same): dS of P = 1, rounded to bf16.
    """
    cases = table(cases_address, Int32, (count, 4))
    given = table(scores_address, Float32, (WARPGROUP_THREADS, REGISTERS))
    given_dp = table(dp_address, Float32, (WARPGROUP_THREADS, REGISTERS))
    delta = table(delta_address, Float32, (COLUMNS,))
    after = table(after_address, Float32, (count, WARPGROUP_THREADS, REGISTERS))
    ds = table(ds_address, Float32, (count, WARPGROUP_THREADS, REGISTERS))
    raw = cute.make_rmem_tensor(REGISTERS, Float32)
    values = cute.make_rmem_tensor(REGISTERS, Float32)
    dp = cute.make_rmem_tensor(REGISTERS, Float32)
    p = layout.make_probability_operand(COLUMNS, cutlass.BFloat16)
    p.fill(cutlass.BFloat16(1.0))
    rounded = layout.make_probability_operand(COLUMNS, cutlass.BFloat16)
    mod, of_mod, hides = (scores.find_mod(name) for name in (score_mod, derivative, mask_mod))
    for i in cutlass.range(count, unroll=1):
        batch, head = cases[i, 2], cases[i, 3]
        for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
            lane = thread % 32
            key = cases[i, 0] + layout.first_row(thread // 32, lane)
            query = cases[i, 1] + layout.first_column(lane)
            keys = key, key + 8
            read(raw, given, thread)
            read(dp, given_dp, thread)
            factors = tanh_factor, mod_factor
            gradients.modified(mod, raw, factors, capped, batch, head, keys, query, (), values)
            if cutlass.const_expr(hides is not None):
                gradients.hide(hides, values, batch, head, keys, query, ())
            gradients.score_gradients(
                p, dp, gradients.of_lane(delta, lane), rounded, cutlass.BFloat16, of_mod, raw, mod_factor, capped,
                batch, head, keys, query, (),
            )  # fmt: skip
            for v in cutlass.range_constexpr(REGISTERS):
                after[i, thread, v] = values[v]
            write_operand(rounded, ds[i, None, None], thread)
