"""Bricks of FP8 attention as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

import matrices_on_host
from brick_wrappers import ROW_VALUES, WARPGROUP_THREADS, table
from fa3.kernels.parts import copies, layout, products, scaled_softmax, scales, softmax, transpose
from fa3.spec import WGMMA_ROWS

#: Columns of V and of the output of ``scaled_softmax_of_tiles``.
OUTPUT_VALUES = 4

#: Columns of the scores of ``rounded_registers``: two steps of the A operand.
ROUNDED_COLUMNS, STEP = 64, 32


@cute.jit
def scaled_softmax_of_tiles(
    scores_address: Int64,
    values_address: Int64,
    scales_address: Int64,
    sinks_address: Int64,
    out_address: Int64,
    lse_address: Int64,
    probabilities_address: Int64,
    states_address: Int64,
    count: Int32,
    tile_count: Int32,
    softmax_scale: Float32,
    threshold: cutlass.Constexpr,
    with_blocks: cutlass.Constexpr,
    with_sinks: cutlass.Constexpr,
):
    """The consumer's main loop on one thread, whose quad consists of four copies of it.

    A product is added up, and its row sums, after the softmax of the next tile, as in the kernel.

    scores (count, tile, 2, ROW_VALUES), values (count, tile, ROW_VALUES, OUTPUT_VALUES), scales (count, tile, 4: of q,
    k and v, largest of v), sinks (count, 2) -> out (count, 2, OUTPUT_VALUES), lse (count, 2), probabilities like
    scores, states (count, tile, 2, 4: offset, reference, factor, whether the warp moved). Without blocks the scales of
    the first tile are those of all.
    """
    given = table(scores_address, Float32, (count, tile_count, 2, ROW_VALUES))
    values = table(values_address, Float32, (count, tile_count, ROW_VALUES, OUTPUT_VALUES))
    of_tiles = table(scales_address, Float32, (count, tile_count, 4))
    sinks = table(sinks_address, Float32, (count, 2))
    out = table(out_address, Float32, (count, 2, OUTPUT_VALUES))
    lse = table(lse_address, Float32, (count, 2))
    probabilities = table(probabilities_address, Float32, (count, tile_count, 2, ROW_VALUES))
    states = table(states_address, Float32, (count, tile_count, 2, 4))
    scores = layout.rows_and_columns(cute.make_rmem_tensor(2 * ROW_VALUES, Float32))
    output = layout.rows_and_columns(cute.make_rmem_tensor(2 * OUTPUT_VALUES, Float32))
    product = layout.rows_and_columns(cute.make_rmem_tensor(2 * OUTPUT_VALUES, Float32))
    sums = cute.make_rmem_tensor(4, Float32)
    share_inverse = cute.make_rmem_tensor(1, Float32)
    state = scaled_softmax.State.make(softmax_scale * softmax.LOG2_E)
    for i in cutlass.range(count, unroll=1):
        # What the case before left must not show.
        state.reset()
        output.fill(0.0)
        product.fill(0.0)
        sums.fill(0.0)
        share_inverse[0] = Float32(1.0)
        for tile in cutlass.range(tile_count, unroll=1):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(ROW_VALUES):
                    scores[r, c] = given[i, tile, r, c]
            at = tile if const_expr(with_blocks) else Int32(0)
            q_scale, k_scale, v_scale, largest_v = (of_tiles[i, at, n] for n in range(4))
            factors = scales.Factors(q_scale * k_scale, None, None)
            if const_expr(with_blocks):
                factors = scales.Factors(q_scale * k_scale, *scales.share_of(v_scale, largest_v))
            scale_log2 = state.scale_log2 * factors.scores
            if const_expr(with_blocks):
                state.set_limits(scale_log2)
            largest = softmax.row_max_bits(cute.recast_tensor(scores, Int32))
            moved = state.exceeded(largest)
            if moved:
                if tile == 0:
                    state.move_to(scores, largest, scale_log2, scaled_softmax.FIRST_THRESHOLD)
                else:
                    state.move_to(scores, largest, scale_log2, threshold)
            state.exponentiate_with(scores, scale_log2, factors)
            # The product of the tile before is relative to the references before.
            for r in cutlass.range_constexpr(2):
                for d in cutlass.range_constexpr(OUTPUT_VALUES):
                    output[r, d] = output[r, d] + product[r, d]
            state.add_sums(sums, share_inverse[0] if const_expr(with_blocks) else None)
            if moved:
                softmax.scale_rows(output, state.factor)
                state.scale_total()
            for r in cutlass.range_constexpr(2):
                states[i, tile, r, 0] = state.offset[r]
                states[i, tile, r, 1] = state.reference[r]
                states[i, tile, r, 2] = state.factor[r] if moved else Float32(1.0)
                states[i, tile, r, 3] = Float32(1.0) if moved else Float32(0.0)
                # The products add the keys of all four lanes.
                sums[2 * r] = 4.0 * softmax.row_sum(scores[r, None])
                for c in cutlass.range_constexpr(ROW_VALUES):
                    probabilities[i, tile, r, c] = scores[r, c]
                for d in cutlass.range_constexpr(OUTPUT_VALUES):
                    of_tile = Float32(0.0)
                    for c in cutlass.range_constexpr(ROW_VALUES):
                        of_tile = of_tile + scores[r, c] * values[i, tile, c, d]
                    product[r, d] = 4.0 * of_tile
            if const_expr(with_blocks):
                share_inverse[0] = factors.share_inverse
        for r in cutlass.range_constexpr(2):
            for d in cutlass.range_constexpr(OUTPUT_VALUES):
                output[r, d] = output[r, d] + product[r, d]
        state.add_sums(sums, share_inverse[0] if const_expr(with_blocks) else None)
        state.sum_up()
        for r in cutlass.range_constexpr(2):
            if const_expr(with_sinks):
                state.add_sink(r, sinks[i, r] * softmax.LOG2_E)
            lse[i, r] = state.log_sum_exp(r)
        state.multiply(of_tiles[i, 0, 3])
        state.normalize(output)
        for r in cutlass.range_constexpr(2):
            for d in cutlass.range_constexpr(OUTPUT_VALUES):
                out[i, r, d] = output[r, d]


# Scales -----------------------------------------------------------------------------------------------------------


@cute.jit
def factors_of_scales(given_address: Int64, out_address: Int64, count: Int32):
    """given (count, 4: scales of q, k and v, largest of v) -> out (count, 4).

    The four: bounded factor of the scores, share of v in log2 units, its inverse, and the inverse of the largest.
    """
    given = table(given_address, Float32, (count, 4))
    out = table(out_address, Float32, (count, 4))
    for i in cutlass.range(count, unroll=1):
        out[i, 0] = scales.bounded_factor(given[i, 0] * given[i, 1])
        out[i, 1], out[i, 2] = scales.share_of(given[i, 2], given[i, 3])
        out[i, 3] = scales.inverse(given[i, 3])


@cute.jit
def scales_in_memory(
    numbers_address: Int64, places_address: Int64, out_address: Int64, count: Int32, query_block: Int32, heads: Int32
):
    """numbers (16,) int64: addresses and strides; places (count, 3: batch, head, block) -> out (count, 5).

    The five: the scales of q, k and v and the largest of v, read one by one, and that of k by the address of its head.
    """
    numbers = table(numbers_address, Int64, (16,))
    places = table(places_address, Int32, (count, 3))
    out = table(out_address, Float32, (count, 5))
    of = scales.Scales.of_numbers((*(numbers[n] for n in range(16)), query_block, heads))
    for i in cutlass.range(count, unroll=1):
        batch_index, head, block = places[i, 0], places[i, 1], places[i, 2]
        for n in cutlass.range_constexpr(4):
            out[i, n] = scales.read((of.q, of.k, of.v, of.largest)[n], batch_index, head, block)
        out[i, 4] = scales.read_block(scales.address_of_head(of.k, batch_index, head), of.k, block)
        if of.query_block != query_block or of.query_heads != heads:
            out[i, 4] = Float32(-1.0)


# Registers and tiles ----------------------------------------------------------------------------------------------


@cute.jit
def rounded_registers(digits_address: Int64, words_address: Int64, operand_address: Int64):
    """words (thread, register) of the A operand of a tile of 64 x ROUNDED_COLUMNS scores, rounded to e4m3.

    digits (row, column) are the scores; operand (thread, value): row + 64 * slot of a step's values, by the DSL's own
    description of the instruction.
    """
    digits = table(digits_address, Float32, (WGMMA_ROWS, ROUNDED_COLUMNS))
    words = table(words_address, Int32, (WARPGROUP_THREADS, ROUNDED_COLUMNS // 8))
    operand = table(operand_address, Int32, (WARPGROUP_THREADS, STEP // 2))
    op = warpgroup.MmaF8Op(
        cutlass.Float8E4M3FN,
        cutlass.Float8E4M3FN,
        Float32,
        (WGMMA_ROWS, ROUNDED_COLUMNS, STEP),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(op)
    registers = cute.make_rmem_tensor(ROUNDED_COLUMNS // 2, Float32)
    scores = layout.rows_and_columns(registers)
    probabilities = layout.make_probability_operand(ROUNDED_COLUMNS, cutlass.Float8E4M3FN)
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        lane = thread % 32
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            for c in cutlass.range_constexpr(ROUNDED_COLUMNS // 4):
                row = layout.first_row(thread // 32, lane) + 8 * r
                scores[r, c] = digits[row, layout.first_column(lane) + layout.column_in_tile(c)]
        products.round_to_fp8(registers, probabilities)
        rounded = cute.recast_tensor(layout.flat(probabilities), Int32)
        for i in cutlass.range_constexpr(ROUNDED_COLUMNS // 8):
            words[thread, i] = rounded[i]
        for v in cutlass.range_constexpr(STEP // 2):
            operand[thread, v] = mma.tv_layout_A_tiled((thread, v))


@cute.jit
def places_by_hand(
    ours_address: Int64,
    layout_address: Int64,
    rows: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    run_time: cutlass.Constexpr,
):
    """ours and layout (row, chunk of 16 columns): the byte where it begins, by arithmetic and by the layout.

    ``run_time``: the first column is known at run time alone.
    """
    ours = table(ours_address, Int32, (rows, columns // 16))
    theirs = table(layout_address, Int32, (rows, columns // 16))
    span = copies.swizzle_span(columns)
    place = copies.shared_layout(cutlass.Float8E4M3FN, (rows, columns, 1), OperandMajorMode.K)
    for row in cutlass.range(rows, unroll=1):
        for chunk in cutlass.range_constexpr(columns // 16):
            theirs[row, chunk] = place((row, 16 * chunk, 0))
    if const_expr(run_time):
        for row in cutlass.range(rows, unroll=1):
            for chunk in cutlass.range(columns // 16, unroll=1):
                ours[row, chunk] = transpose.place_in_tile(row % 8, row // 8 * 8, 16 * chunk, Int32(0), rows, span, 0)
    else:
        for row in cutlass.range(rows, unroll=1):
            for chunk in cutlass.range_constexpr(columns // 16):
                part, within = 16 * chunk // span * span, 16 * chunk % span
                ours[row, chunk] = transpose.place_in_tile(row, 0, 0, Int32(within), rows, span, part)


@cute.jit
def transposed_tile(
    loads_address: Int64,
    words_address: Int64,
    stores_address: Int64,
    keys: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    at_once: cutlass.Constexpr,
    calls: cutlass.Constexpr,
):
    """A tile of v, transposed by three warps; the tables are those of `matrices_on_host`, one thread of them a lane."""
    threads = 32 * transpose.WARPS
    matrices_on_host.begin(
        table(loads_address, Int32, (threads, calls)),
        table(words_address, Int32, (threads, calls, 4)),
        table(stores_address, Int32, (threads, calls, 5)),
    )
    for thread in cutlass.range(threads, unroll=1):
        matrices_on_host.become(thread)
        transpose.transpose_tile(Int32(0), Int32(0), keys, columns, at_once, thread // 32, thread % 32)


@cute.jit
def layout_of_tile(out_address: Int64, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """out (row, column): the byte of a tile of 8-bit elements in shared memory, by the layout."""
    out = table(out_address, Int32, (rows, columns))
    place = copies.shared_layout(cutlass.Float8E4M3FN, (rows, columns, 1), OperandMajorMode.K)
    for row in cutlass.range(rows, unroll=1):
        for column in cutlass.range(columns, unroll=1):
            out[row, column] = place((row, column, 0))


@cute.jit
def sorted_columns(stores_address: Int64, columns: cutlass.Constexpr):
    """An out tile whose elements are row + 64 * accumulator column; stores (thread, call, 5: byte, words, unused)."""
    calls = columns // 8
    matrices_on_host.begin(None, None, table(stores_address, Int32, (WARPGROUP_THREADS, calls, 5)))
    values = cute.make_rmem_tensor(columns // 2, cutlass.Int16)
    view = layout.rows_and_columns(values)
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        lane = thread % 32
        first = layout.first_row(thread // 32, lane)
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            for c in cutlass.range_constexpr(columns // 4):
                column = layout.first_column(lane) + layout.column_in_tile(c)
                view[r, c] = cutlass.Int16(first + 8 * r + WGMMA_ROWS * column)
        matrices_on_host.become(thread)
        transpose.store_sorted(Int32(0), values, first, lane, columns)
