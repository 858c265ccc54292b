"""Transposing tiles of v in shared memory, by the warps of the producer's warpgroup that load nothing.

The tensor core takes FP8 operands along the dimension that is summed over, for V that of the keys. A v that lies in
memory by rows is brought as it is and transposed here, 32 keys x 16 columns at a time: pairs of neighbouring columns
are moved as 16-bit elements by transposing loads, their bytes sorted into words of four keys of one column, in the
order that `fa3.kernels.parts.layout` explains, and the words stored as rows of the transposed tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa3.spec import WGMMA_ROWS

from . import layout, ptx
from .copies import swizzle_span

#: Warps that transpose, and how many keys and columns one does at a time.
WARPS = 3
KEYS, COLUMNS = 32, 16

#: Consumer warpgroups -> units of so many keys and columns that a warp has in flight, as many as its registers take.
AT_ONCE = {1: 3, 2: 3, 3: 2, 4: 2}

#: Bytes of a row of a matrix that one lane has the address of.
CHUNK = 16


@cute.jit
def place_in_tile(
    row: Int32,
    first_row: Int32 | int,
    first_column: Int32 | int,
    column: Int32 | int,
    rows: cutlass.Constexpr,
    span: cutlass.Constexpr,
    more_columns: cutlass.Constexpr,
) -> Int32:
    """Byte of element (first_row + row, first_column + more_columns + column) in a swizzled tile of ``rows`` rows.

    Columns are cut into parts of ``span`` bytes, as `fa3.kernels.parts.copies.shared_layout` lays out 8-bit tiles.
    ``first_row`` is a multiple of 8. The numbers of columns are multiples of 16; where ``first_column`` is known at run
    time alone, a part holds no sum of the three but whole.
    """
    known = first_column + more_columns
    chunk = known % span + column
    # The chunk of 16 bytes in its line of 128 changes place with the line's number among 8, 4 or 2.
    key = row * span // 128 % (span // CHUNK) * CHUNK
    return known // span * (rows * span) + first_row * span + row * span + (chunk ^ key)


@cute.jit
def transpose_tile(
    source: Int32,
    target: Int32,
    keys: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    at_once: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
):
    """Transpose a tile; the addresses are of shared memory, multiples of 1024 bytes, ``warp`` is 0 to ``WARPS`` - 1.

    ``at_once`` units are in flight. Each warp has keys of its own, or columns: of the places, all but a few numbers are
    then known at compile time.
    """
    if const_expr(keys % (WARPS * KEYS) == 0):
        key = warp * (keys // WARPS)
        units = [(k, c) for k in range(0, keys // WARPS, KEYS) for c in range(0, columns, COLUMNS)]
        transpose_units(source, target, keys, columns, key, Int32(0), units, at_once, lane)
    else:
        rounds = columns // (WARPS * COLUMNS)
        units = [(k, i * WARPS * COLUMNS) for i in range(rounds) for k in range(0, keys, KEYS)]
        transpose_units(source, target, keys, columns, Int32(0), warp * COLUMNS, units, at_once, lane)
        left = columns // COLUMNS - rounds * WARPS
        if const_expr(left > 0):
            if warp < left:
                column = (rounds * WARPS + warp) * COLUMNS
                others = [(k, 0) for k in range(0, keys, KEYS)]
                transpose_units(source, target, keys, columns, Int32(0), column, others, at_once, lane)


@cute.jit
def transpose_units(
    source: Int32,
    target: Int32,
    keys: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    first_key: Int32,
    first_column: Int32,
    units: cutlass.Constexpr,
    at_once: cutlass.Constexpr,
    lane: Int32,
):
    """Transpose units of a tile, each loaded while those before it are sorted and stored.

    First the even ones of 16 columns become rows, then the odd ones: a matrix is then 8 rows next to each other, which
    do not meet in the banks of shared memory. The epilogue puts the columns of the output back into order.
    """
    across, down = swizzle_span(columns), swizzle_span(keys)
    waiting = []
    for n in cutlass.range_constexpr(len(units) + at_once):
        if const_expr(n >= at_once):
            key, column = units[n - at_once]
            one, two, three, four = waiting[n - at_once]
            row, slot = lane % COLUMNS, lane // COLUMNS * CHUNK
            place = place_in_tile(row, first_column + column, first_key, slot, columns, down, key)
            ptx.store_matrices(
                target + place,
                Int32(cute.arch.prmt(one, two, 0x6420)),
                Int32(cute.arch.prmt(one, two, 0x7531)),
                Int32(cute.arch.prmt(three, four, 0x6420)),
                Int32(cute.arch.prmt(three, four, 0x7531)),
            )
        if const_expr(n < len(units)):
            key, column = units[n]
            place = place_in_tile(lane, first_key + key, first_column, 0, keys, across, column)
            waiting.append(ptx.load_matrices_transposed(source + place))


@cute.jit
def store_sorted(target: Int32, output: cute.Tensor, row: Int32, lane: Int32, columns: cutlass.Constexpr):
    """Store a part of an output, whose columns have the order of `transpose_units`, as a swizzled tile of 16 bits.

    Args:
        target: address of the tile in shared memory, a multiple of 1024 bytes.
        output: the accumulator of ``columns`` columns, rounded: pairs of neighbouring columns are words.
        row: the row of the tile that is the thread's row 0; its row 1 is 8 further down.
    """
    span = swizzle_span(2 * columns)
    words = cute.recast_tensor(layout.flat(output), Int32)
    for block in cutlass.range_constexpr(columns // COLUMNS):
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            # Columns 4 * t and 4 * t + 2 of the block, and those behind them.
            even, odd = words[4 * block + r], words[4 * block + 2 + r]
            byte = 8 * (lane % 4)
            place = place_in_tile(row, 8 * r, 0, byte // CHUNK * CHUNK, WGMMA_ROWS, span, 2 * COLUMNS * block)
            place = place + byte % CHUNK
            ptx.store_pair(
                target + place, Int32(cute.arch.prmt(even, odd, 0x5410)), Int32(cute.arch.prmt(even, odd, 0x7632))
            )
