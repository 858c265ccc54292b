"""The online softmax as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from brick_wrappers import ROW_VALUES, table
from fa3.kernels.parts import layout, softmax

#: Columns of V and of the output of ``online_softmax``.
OUTPUT_VALUES = 4


@cute.jit
def row_maxima(
    scores_address: Int64,
    reference_address: Int64,
    margin_address: Int64,
    bits_address: Int64,
    float_address: Int64,
    limit_address: Int64,
    exceeds_address: Int64,
    count: Int32,
):
    """Everything that decides whether references move, for two rows at a time.

    scores (count, 2, ROW_VALUES), reference and margin (count, 2) -> bits (count, 2), float (count, 2) with
    the reference as its start, limit (count, 2), exceeds (count).
    """
    given = table(scores_address, Float32, (count, 2, ROW_VALUES))
    reference = table(reference_address, Float32, (count, 2))
    margin = table(margin_address, Float32, (count, 2))
    bits = table(bits_address, Int32, (count, 2))
    largest = table(float_address, Float32, (count, 2))
    limit = table(limit_address, Int32, (count, 2))
    answer = table(exceeds_address, Int32, (count,))
    registers = cute.make_rmem_tensor(2 * ROW_VALUES, Float32)
    scores = layout.rows_and_columns(registers)
    limits = cute.make_rmem_tensor(2, Int32)
    for i in cutlass.range(count, unroll=1):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(ROW_VALUES):
                scores[r, c] = given[i, r, c]
        both = softmax.row_max_bits(cute.recast_tensor(scores, Int32))
        for r in cutlass.range_constexpr(2):
            bits[i, r] = both[r]
            largest[i, r] = softmax.row_max_float(scores[r, None], reference[i, r])
            limits[r] = softmax.limit_of(reference[i, r], margin[i, r])
            limit[i, r] = limits[r]
        answer[i] = Int32(softmax.exceeds(scores, limits))


@cute.jit
def row_arithmetic(
    rows_address: Int64,
    scale_address: Int64,
    offset_address: Int64,
    exponentials_address: Int64,
    sum_address: Int64,
    scaled_address: Int64,
    count: Int32,
):
    """rows (count, 2, ROW_VALUES), scale and offset (count, 2) -> exponentials and scaled like rows, sum (count, 2).

    The factor of ``scale_rows`` is the scale, and the sum is that of the row as given.
    """
    given = table(rows_address, Float32, (count, 2, ROW_VALUES))
    scale = table(scale_address, Float32, (count, 2))
    offset = table(offset_address, Float32, (count, 2))
    exponentials = table(exponentials_address, Float32, (count, 2, ROW_VALUES))
    total = table(sum_address, Float32, (count, 2))
    scaled = table(scaled_address, Float32, (count, 2, ROW_VALUES))
    registers = cute.make_rmem_tensor(2 * ROW_VALUES, Float32)
    rows = layout.rows_and_columns(registers)
    factor = cute.make_rmem_tensor(2, Float32)
    for i in cutlass.range(count, unroll=1):
        for r in cutlass.range_constexpr(2):
            factor[r] = scale[i, r]
            for c in cutlass.range_constexpr(ROW_VALUES):
                rows[r, c] = given[i, r, c]
        for r in cutlass.range_constexpr(2):
            total[i, r] = softmax.row_sum(rows[r, None])
        softmax.scale_rows(rows, factor)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(ROW_VALUES):
                scaled[i, r, c] = rows[r, c]
                rows[r, c] = given[i, r, c]
        # One row only is asked for at a time: the other must stay.
        softmax.exponentiate(rows[0, None], scale[i, 0], offset[i, 0])
        for c in cutlass.range_constexpr(ROW_VALUES):
            exponentials[i, 1, c] = rows[1, c]
            exponentials[i, 0, c] = rows[0, c]


@cute.jit
def online_softmax(
    scores_address: Int64,
    values_address: Int64,
    sinks_address: Int64,
    out_address: Int64,
    lse_address: Int64,
    moved_address: Int64,
    largest_address: Int64,
    count: Int32,
    tile_count: Int32,
    softmax_scale: Float32,
    threshold: cutlass.Constexpr,
    with_sinks: cutlass.Constexpr,
):
    """The consumer's main loop on one thread, whose quad consists of four copies of it.

    scores (count, tile, 2, ROW_VALUES), values (count, tile, ROW_VALUES, OUTPUT_VALUES), sinks (count, 2) ->
    out (count, 2, OUTPUT_VALUES), lse (count, 2), moved (count, tile),
    largest probability before normalization (count, tile, 2).
    """
    given = table(scores_address, Float32, (count, tile_count, 2, ROW_VALUES))
    values = table(values_address, Float32, (count, tile_count, ROW_VALUES, OUTPUT_VALUES))
    sinks = table(sinks_address, Float32, (count, 2))
    out = table(out_address, Float32, (count, 2, OUTPUT_VALUES))
    lse = table(lse_address, Float32, (count, 2))
    moved = table(moved_address, Int32, (count, tile_count))
    largest = table(largest_address, Float32, (count, tile_count, 2))
    scores = layout.rows_and_columns(cute.make_rmem_tensor(2 * ROW_VALUES, Float32))
    output = layout.rows_and_columns(cute.make_rmem_tensor(2 * OUTPUT_VALUES, Float32))
    state = softmax.State.make(softmax_scale * softmax.LOG2_E)
    for i in cutlass.range(count, unroll=1):
        # What the case before left must not show.
        state.reset()
        for r in cutlass.range_constexpr(2):
            for d in cutlass.range_constexpr(OUTPUT_VALUES):
                output[r, d] = Float32(0.0)
        for tile in cutlass.range(tile_count, unroll=1):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(ROW_VALUES):
                    scores[r, c] = given[i, tile, r, c]
            moved[i, tile] = Int32(0)
            if state.must_move(scores):
                state.move(scores, threshold)
                softmax.scale_rows(output, state.factor)
                moved[i, tile] = Int32(1)
            state.exponentiate(scores)
            for r in cutlass.range_constexpr(2):
                largest[i, tile, r] = softmax.row_max_float(scores[r, None], Float32(0.0))
                for d in cutlass.range_constexpr(OUTPUT_VALUES):
                    product = Float32(0.0)
                    for c in cutlass.range_constexpr(ROW_VALUES):
                        product = product + scores[r, c] * values[i, tile, c, d]
                    # The matrix product adds the keys of all four lanes.
                    output[r, d] = output[r, d] + 4.0 * product
        state.sum_up()
        for r in cutlass.range_constexpr(2):
            if cutlass.const_expr(with_sinks):
                state.add_sink(r, sinks[i, r] * softmax.LOG2_E)
            lse[i, r] = state.log_sum_exp(r)
        state.normalize(output)
        for r in cutlass.range_constexpr(2):
            for d in cutlass.range_constexpr(OUTPUT_VALUES):
                out[i, r, d] = output[r, d]
