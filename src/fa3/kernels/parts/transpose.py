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

#: Units of so many keys and columns that a warp has in flight.
AT_ONCE = 2

#: Bytes of a row of a matrix that one lane has the address of.
CHUNK = 16


@cute.jit
def place_in_tile(
    row: Int32,
    first_row: Int32 | int,
    column: Int32,
    rows: cutlass.Constexpr,
    span: cutlass.Constexpr,
    first_column: cutlass.Constexpr = 0,
) -> Int32:
    """Byte at which element (first_row + row, first_column + column) lies in a swizzled tile of ``rows`` rows.

    Columns are cut into parts of ``span`` bytes, as `fa3.kernels.parts.copies.shared_layout` lays out 8-bit tiles.
    ``first_row`` is a multiple of 8, ``first_column`` of 32, ``column`` of 16, and within a part with ``first_column``.
    """
    chunk = first_column % span + column % span
    # The chunk of 16 bytes in its line of 128 changes place with the line's number among 8, 4 or 2.
    key = row * span // 128 % (span // CHUNK) * CHUNK
    part = (first_column // span + column // span) * (rows * span)
    return part + first_row * span + row * span + (chunk ^ key)


@cute.jit
def transpose_tile(
    source: Int32, target: Int32, keys: cutlass.Constexpr, columns: cutlass.Constexpr, warp: Int32, lane: Int32
):
    """Transpose a tile; the addresses are of shared memory, multiples of 1024 bytes, ``warp`` is 0 to ``WARPS`` - 1."""
    # Each warp has columns of its own: of the places, all but a few numbers are then known when this is compiled.
    for i in cutlass.range_constexpr((columns // COLUMNS + WARPS - 1) // WARPS):
        column = (warp + i * WARPS) * COLUMNS
        if const_expr((i + 1) * WARPS * COLUMNS <= columns):
            transpose_columns(source, target, keys, columns, column, lane)
        elif column < columns:
            transpose_columns(source, target, keys, columns, column, lane)


@cute.jit
def transpose_columns(
    source: Int32, target: Int32, keys: cutlass.Constexpr, columns: cutlass.Constexpr, column: Int32, lane: Int32
):
    """Transpose ``COLUMNS`` columns of a tile.

    First the even ones of them become rows, then the odd ones: a matrix is then 8 rows next to each other, which do not
    meet in the banks of shared memory. The epilogue puts the columns of the output back into order.
    """
    for first in cutlass.range_constexpr(0, keys, AT_ONCE * KEYS):
        some = range(first, min(first + AT_ONCE * KEYS, keys), KEYS)
        # All loads before the first store: they wait for shared memory together.
        words = [
            ptx.load_matrices_transposed(source + place_in_tile(lane, key, column, keys, swizzle_span(columns)))
            for key in some
        ]
        for i in cutlass.range_constexpr(len(some)):
            row, slot = lane % COLUMNS, lane // COLUMNS * CHUNK
            place = place_in_tile(row, column, slot, columns, swizzle_span(keys), some[i])
            one, two, three, four = words[i]
            ptx.store_matrices(
                target + place,
                Int32(cute.arch.prmt(one, two, 0x6420)),
                Int32(cute.arch.prmt(one, two, 0x7531)),
                Int32(cute.arch.prmt(three, four, 0x6420)),
                Int32(cute.arch.prmt(three, four, 0x7531)),
            )


@cute.jit
def store_sorted(target: Int32, output: cute.Tensor, row: Int32, lane: Int32, columns: cutlass.Constexpr):
    """Store a part of an output whose columns have the order of `store_unit` as a swizzled tile of 16-bit elements.

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
            place = place_in_tile(row, 8 * r, byte // CHUNK * CHUNK, WGMMA_ROWS, span, 2 * COLUMNS * block)
            place = place + byte % CHUNK
            ptx.store_pair(
                target + place, Int32(cute.arch.prmt(even, odd, 0x5410)), Int32(cute.arch.prmt(even, odd, 0x7632))
            )
