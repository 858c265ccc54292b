"""Kernel bricks as functions of the host: layouts, masks, the order of tiles, lists of blocks, rings of stages.

Loops over cases that read and write plain tables in memory: every pointer is the address of a contiguous CPU tensor.
Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.kernels.parts import barriers, copies, layout, mask, rows, tiles
from mask_bounds import KINDS

WARPGROUP_THREADS = 128

#: Depths of a pipeline.
STAGES = (1, 2, 3, 4)

#: Columns of a score tile here: 16 registers of each thread, in 2 rows.
COLUMNS = 32
ROW_VALUES = COLUMNS // 4


def table(address: Int64, dtype: type[cutlass.Numeric], shape: tuple) -> cute.Tensor:
    """A row-major tensor in host memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.generic, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


# Layouts ----------------------------------------------------------------------------------------------------------


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
def orders_of_v(out_address: Int64, keys: cutlass.Constexpr, columns: cutlass.Constexpr, stages: cutlass.Constexpr):
    """out (key, column, stage, 2): where an element of V lies, seen as (columns, keys) and as (keys, columns)."""
    out = table(out_address, Int32, (keys, columns, stages, 2))
    by_column = copies.shared_layout(cutlass.BFloat16, (columns, keys, stages), OperandMajorMode.MN)
    by_key = copies.shared_layout(cutlass.BFloat16, (keys, columns, stages), OperandMajorMode.K)
    for key in cutlass.range(keys, unroll=1):
        for column in cutlass.range(columns, unroll=1):
            for stage in cutlass.range(stages, unroll=1):
                out[key, column, stage, 0] = by_column((column, key, stage))
                out[key, column, stage, 1] = by_key((key, column, stage))


@cute.jit
def places_in_tiles(
    out_address: Int64,
    rows_of_tile: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    count: cutlass.Constexpr,
    pitch: cutlass.Constexpr,
):
    """out (tile, row, column): where an element of tiles that are ``pitch`` apart lies; None: one after the other."""
    out = table(out_address, Int32, (count, rows_of_tile, columns))
    shape = rows_of_tile, columns, count
    place = copies.shared_layout(cutlass.BFloat16, shape, OperandMajorMode.K, pitch)
    for tile in cutlass.range(count, unroll=1):
        for row in cutlass.range(rows_of_tile, unroll=1):
            for column in cutlass.range(columns, unroll=1):
                out[tile, row, column] = place((row, column, tile))


# Masks ------------------------------------------------------------------------------------------------------------


@cute.jit
def keys_of_queries(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 6: query, seqlen_q, seqlen_k, left, right, chunk) -> out (count, kind, 2: first key, end key)."""
    cases = table(cases_address, Int32, (count, 6))
    out = table(out_address, Int32, (count, len(KINDS), 2))
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 1], cases[i, 2], cases[i, 3], cases[i, 4], cases[i, 5])
        for kind in cutlass.range_constexpr(len(KINDS)):
            out[i, kind, 0] = bounds.first_key(cases[i, 0], KINDS[kind])
            out[i, kind, 1] = bounds.end_key(cases[i, 0], KINDS[kind])


@cute.jit
def tiles_of_queries(cases_address: Int64, out_address: Int64, count: Int32, tile_n: cutlass.Constexpr):
    """cases (count, 7: first and last query, seqlen_q, seqlen_k, left, right, chunk) -> out (count, kind, 4).

    The four are the first and one past the last key tile with a key that is seen, and the same of whole tiles.
    """
    cases = table(cases_address, Int32, (count, 7))
    out = table(out_address, Int32, (count, len(KINDS), 4))
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 2], cases[i, 3], cases[i, 4], cases[i, 5], cases[i, 6])
        queries = cases[i, 0], cases[i, 1]
        for kind in cutlass.range_constexpr(len(KINDS)):
            needed = bounds.key_tiles(*queries, tile_n, KINDS[kind])
            whole = bounds.whole_key_tiles(*queries, tile_n, KINDS[kind])
            for n in cutlass.range_constexpr(2):
                out[i, kind, n] = needed[n]
                out[i, kind, 2 + n] = whole[n]


@cute.jit
def masked_tiles(cases_address: Int64, out_address: Int64, count: Int32, tile_n: cutlass.Constexpr):
    """cases (count, 8: first row, group, first key, seqlen_q, seqlen_k, left, right, chunk) -> out.

    out (count, kind, thread, register): register ``i`` of each thread holds the score ``i`` before the mask. Rows are
    the heads of a group of each query, as packed rows are.
    """
    cases = table(cases_address, Int32, (count, 8))
    out = table(out_address, Float32, (count, len(KINDS), WARPGROUP_THREADS, tile_n // 2))
    scores = cute.make_rmem_tensor(tile_n // 2, Float32)
    for i in cutlass.range(count, unroll=1):
        bounds = mask.Mask(cases[i, 3], cases[i, 4], cases[i, 5], cases[i, 6], cases[i, 7])
        for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
            lane = thread % 32
            row = cases[i, 0] + layout.first_row(thread // 32, lane)
            queries = rows.query_of(row, cases[i, 1], True), rows.query_of(row + 8, cases[i, 1], True)
            key = cases[i, 2] + layout.first_column(lane)
            for kind in cutlass.range_constexpr(len(KINDS)):
                for v in cutlass.range(cute.size(scores), unroll_full=True):
                    scores[v] = Float32(v)
                bounds.hide(layout.rows_and_columns(scores), queries, key, KINDS[kind])
                for v in cutlass.range(cute.size(scores), unroll_full=True):
                    out[i, kind, thread, v] = scores[v]


@cute.jit
def words(numbers_address: Int64, columns_address: Int64, bits_address: Int64, count: Int32):
    """numbers (count,) -> columns before each, and a word with so many bits, as signed integers."""
    numbers = table(numbers_address, Int32, (count,))
    columns = table(columns_address, Int32, (count,))
    bits = table(bits_address, Int32, (count,))
    for i in cutlass.range(count, unroll=1):
        columns[i] = mask.columns_before(numbers[i])
        bits[i] = Int32(mask.lowest_bits(numbers[i]))


# Tiles ------------------------------------------------------------------------------------------------------------


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
def listed_tiles(
    counts_address: Int64,
    indices_address: Int64,
    steps_address: Int64,
    tiles_address: Int64,
    batch: Int32,
    heads: Int32,
    query_blocks: Int32,
    key_blocks: Int32,
    batch_stride: Int32,
    head_stride: Int32,
    tile_n: cutlass.Constexpr,
):
    """steps (batch, heads, query block, 2: cut, in all) and the key tile of each step of a block mask.

    tiles (batch, heads, query block, steps of all key blocks); what is no step stays as it is.
    """
    most = key_blocks * (128 // tile_n)
    steps = table(steps_address, Int32, (batch, heads, query_blocks, 2))
    key_tiles = table(tiles_address, Int32, (batch, heads, query_blocks, most))
    blocks = counts_address, indices_address, batch_stride, head_stride, key_blocks
    for b in cutlass.range(batch, unroll=1):
        for h in cutlass.range(heads, unroll=1):
            for m in cutlass.range(query_blocks, unroll=1):
                address, cut, count = tiles.block_list(blocks, b, h, m, tile_n)
                steps[b, h, m, 0] = cut
                steps[b, h, m, 1] = count
                for step in cutlass.range(count, unroll=1):
                    key_tiles[b, h, m, step] = tiles.listed_key_tile(address, step, tile_n)


# Barriers ---------------------------------------------------------------------------------------------------------


@cute.jit
def ring(out_address: Int64, first: Int32, count: Int32):
    """out (depth of the pipeline, position - first, 2: stage, phase)."""
    out = table(out_address, Int32, (len(STAGES), count, 2))
    for s in cutlass.range_constexpr(len(STAGES)):
        for i in cutlass.range(count, unroll=1):
            out[s, i, 0] = barriers.stage_of(first + i, STAGES[s])
            out[s, i, 1] = barriers.phase_of(first + i, STAGES[s])
