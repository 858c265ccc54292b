"""Kernel bricks as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.kernels.parts import barriers, layout, mask, softmax, tiles

WARPGROUP_THREADS = 128

#: Keys of a tile whose row bounds are asked for.
TILE_NS = (16, 48, 64, 80, 128, 176)

#: Depths of a pipeline.
STAGES = (1, 2, 3, 4)

#: Columns of the score tiles here: 16 registers of each thread, in 2 rows.
COLUMNS = 32
ROW_VALUES = COLUMNS // 4

#: Columns of V and of the output of ``online_softmax``.
OUTPUT_VALUES = 4


def table(address: Int64, dtype: type[cutlass.Numeric], shape: tuple) -> cute.Tensor:
    """A row-major tensor in host memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.generic, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


@cute.jit
def key_bounds(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 3: row, seqlen_q, seqlen_k) -> out (count, tile_n, causal, 3: keys, tiles, whole tiles)."""
    cases = table(cases_address, Int32, (count, 3))
    out = table(out_address, Int32, (count, len(TILE_NS), 2, 3))
    for i in cutlass.range(count, unroll=1):
        row, seqlen_q, seqlen_k = cases[i, 0], cases[i, 1], cases[i, 2]
        for t in cutlass.range_constexpr(len(TILE_NS)):
            for c in cutlass.range_constexpr(2):
                causal = c == 1
                out[i, t, c, 0] = mask.visible_keys(row, seqlen_q, seqlen_k, causal)
                out[i, t, c, 1] = mask.key_tiles(row, seqlen_q, seqlen_k, TILE_NS[t], causal)
                out[i, t, c, 2] = mask.whole_key_tiles(row, seqlen_q, seqlen_k, TILE_NS[t], causal)


@cute.jit
def masked_tiles(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 4: tile's first row, first key, seqlen_q, seqlen_k) -> out (count, causal, thread, register).

    Register ``i`` of each thread holds the score ``i`` before the mask.
    """
    cases = table(cases_address, Int32, (count, 4))
    out = table(out_address, Float32, (count, 2, WARPGROUP_THREADS, COLUMNS // 2))
    scores = cute.make_rmem_tensor(COLUMNS // 2, Float32)
    for i in cutlass.range(count, unroll=1):
        for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
            lane = thread % 32
            row = cases[i, 0] + layout.first_row(thread // 32, lane)
            key = cases[i, 1] + layout.first_column(lane)
            for c in cutlass.range_constexpr(2):
                for v in cutlass.range_constexpr(cute.size(scores)):
                    scores[v] = Float32(v)
                mask.mask_scores(layout.rows_and_columns(scores), row, key, cases[i, 2], cases[i, 3], c == 1)
                for v in cutlass.range_constexpr(cute.size(scores)):
                    out[i, c, thread, v] = scores[v]


@cute.jit
def accumulator_layout(ours_address: Int64, chip_address: Int64, operand_address: Int64):
    """Where registers lie in a 64 x COLUMNS tile, as row + 64 * column.

    ours (thread, row, column of the thread) by this project's functions, written through its view of the
    registers; chip (thread, register) of the accumulator and operand (thread, register) of one step of the A
    operand by the DSL's own description of the instruction.
    """
    ours = table(ours_address, Int32, (WARPGROUP_THREADS, COLUMNS // 2))
    chip = table(chip_address, Int32, (WARPGROUP_THREADS, COLUMNS // 2))
    operand = table(operand_address, Int32, (WARPGROUP_THREADS, 8))
    op = warpgroup.MmaF16BF16Op(
        cutlass.BFloat16,
        Float32,
        (64, COLUMNS, 16),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(op)
    registers = cute.make_rmem_tensor(COLUMNS // 2, Int32)
    view = layout.rows_and_columns(registers)
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        lane = thread % 32
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            for c in cutlass.range_constexpr(ROW_VALUES):
                row = layout.first_row(thread // 32, lane) + 8 * r
                column = layout.first_column(lane) + layout.column_in_tile(c)
                view[r, c] = row + 64 * column
        for v in cutlass.range_constexpr(COLUMNS // 2):
            ours[thread, v] = registers[v]
            chip[thread, v] = mma.tv_layout_C_tiled((thread, v))
        for v in cutlass.range_constexpr(8):
            operand[thread, v] = mma.tv_layout_A_tiled((thread, v))


@cute.jit
def places_of_tiles(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 6: m_blocks, heads, batch, section, levels, first line of out) -> out (line, longest first, 3)."""
    cases = table(cases_address, Int32, (count, 6))
    for i in cutlass.range(count, unroll=1):
        m_blocks, heads, batch, section, levels = (cases[i, n] for n in range(5))
        count_here = m_blocks * heads * batch
        out = table(out_address + Int64(cases[i, 5]) * 24, Int32, (count_here, 2, 3))
        for tile in cutlass.range(count_here, unroll=1):
            for longest_first in cutlass.range_constexpr(2):
                place = tiles.place_of_tile(tile, m_blocks, heads, batch, section, levels, longest_first == 1)
                for n in cutlass.range_constexpr(3):
                    out[tile, longest_first, n] = place[n]


@cute.jit
def ring(out_address: Int64, first: Int32, count: Int32):
    """out (depth of the pipeline, position - first, 2: stage, phase)."""
    out = table(out_address, Int32, (len(STAGES), count, 2))
    for s in cutlass.range_constexpr(len(STAGES)):
        for i in cutlass.range(count, unroll=1):
            out[s, i, 0] = barriers.stage_of(first + i, STAGES[s])
            out[s, i, 1] = barriers.phase_of(first + i, STAGES[s])


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
        for r in cutlass.range_constexpr(2):
            bits[i, r] = softmax.row_max_bits(cute.recast_tensor(scores, Int32)[r, None])
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
    out_address: Int64,
    lse_address: Int64,
    moved_address: Int64,
    largest_address: Int64,
    count: Int32,
    tile_count: Int32,
    softmax_scale: Float32,
    threshold: cutlass.Constexpr,
):
    """The consumer's main loop on one thread, whose quad consists of four copies of it.

    scores (count, tile, 2, ROW_VALUES), values (count, tile, ROW_VALUES, OUTPUT_VALUES) ->
    out (count, 2, OUTPUT_VALUES), lse (count, 2), moved (count, tile),
    largest probability before normalization (count, tile, 2).
    """
    given = table(scores_address, Float32, (count, tile_count, 2, ROW_VALUES))
    values = table(values_address, Float32, (count, tile_count, ROW_VALUES, OUTPUT_VALUES))
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
        state.normalize(output)
        for r in cutlass.range_constexpr(2):
            lse[i, r] = state.log_sum_exp(r)
            for d in cutlass.range_constexpr(OUTPUT_VALUES):
                out[i, r, d] = output[r, d]
