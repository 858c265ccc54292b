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
def place_in_tile(row: Int32, column: Int32, rows: cutlass.Constexpr, span: cutlass.Constexpr) -> Int32:
    """Byte at which an element lies in a swizzled tile of ``rows`` rows, whose columns are cut into parts of ``span``.

    ``column`` is a multiple of 16. As `fa3.kernels.parts.copies.shared_layout` lays out 8-bit tiles.
    """
    linear = column // span * (rows * span) + row * span + column % span
    # The chunk of 16 bytes in its line changes place with the line's number among 8, 4 or 2.
    return linear ^ ((linear >> 7) % (span // CHUNK) * CHUNK)


@cute.jit
def transpose_tile(
    source: Int32, target: Int32, keys: cutlass.Constexpr, columns: cutlass.Constexpr, warp: Int32, lane: Int32
):
    """Transpose a tile; the addresses are of shared memory, multiples of 1024 bytes, ``warp`` is 0 to ``WARPS`` - 1."""
    units = columns // COLUMNS * (keys // KEYS)
    # A loop at run time: unrolled, the compiler keeps the addresses of all units, and has no registers for them.
    for first in cutlass.range(warp, units - (AT_ONCE - 1) * WARPS, AT_ONCE * WARPS, unroll=1):
        # All loads before the first store: they wait for shared memory together.
        words = [load_unit(source, keys, columns, first + i * WARPS, lane) for i in range(AT_ONCE)]
        for i in cutlass.range_constexpr(AT_ONCE):
            store_unit(target, keys, columns, first + i * WARPS, lane, words[i])
    last = warp + (units - warp + WARPS - 1) // WARPS // AT_ONCE * AT_ONCE * WARPS
    for unit in cutlass.range(last, units, WARPS, unroll=1):
        store_unit(target, keys, columns, unit, lane, load_unit(source, keys, columns, unit, lane))


@cute.jit
def load_unit(source: Int32, keys: cutlass.Constexpr, columns: cutlass.Constexpr, unit: Int32, lane: Int32) -> tuple:
    """Four words of ``KEYS`` keys x ``COLUMNS`` columns."""
    across = columns // COLUMNS
    key, column = unit // across * KEYS, unit % across * COLUMNS
    return ptx.load_matrices_transposed(source + place_in_tile(key + lane, column, keys, swizzle_span(columns)))


@cute.jit
def store_unit(
    target: Int32, keys: cutlass.Constexpr, columns: cutlass.Constexpr, unit: Int32, lane: Int32, words: tuple
):
    """Sort the words' bytes and store them.

    Of 16 columns first the even ones become rows, then the odd ones: a matrix is then 8 rows next to each other, which
    do not meet in the banks of shared memory. The epilogue puts the columns of the output back into order.
    """
    across = columns // COLUMNS
    key, column = unit // across * KEYS, unit % across * COLUMNS
    first, second, third, fourth = words
    place = place_in_tile(column + lane % COLUMNS, key + lane // COLUMNS * CHUNK, columns, swizzle_span(keys))
    ptx.store_matrices(
        target + place,
        Int32(cute.arch.prmt(first, second, 0x6420)),
        Int32(cute.arch.prmt(first, second, 0x7531)),
        Int32(cute.arch.prmt(third, fourth, 0x6420)),
        Int32(cute.arch.prmt(third, fourth, 0x7531)),
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
            byte = 2 * COLUMNS * block + 8 * (lane % 4)
            place = place_in_tile(row + 8 * r, byte // CHUNK * CHUNK, WGMMA_ROWS, span) + byte % CHUNK
            ptx.store_pair(
                target + place, Int32(cute.arch.prmt(even, odd, 0x5410)), Int32(cute.arch.prmt(even, odd, 0x7632))
            )
