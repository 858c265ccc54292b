"""Transposing tiles of v in shared memory, by the warps of the producer's warpgroup that load nothing.

The tensor core takes FP8 operands along the dimension that is summed over, for V that of the keys. A v that lies in
memory by rows is brought as it is and transposed here, 32 keys x 16 columns at a time: pairs of neighbouring columns
are moved as 16-bit elements by transposing loads, their bytes sorted into words of four keys of one column, in the
order that `fa3.kernels.parts.layout` explains, and the words stored as rows of the transposed tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import ptx
from .copies import swizzle_span

#: Warps that transpose, and how many keys and columns one does at a time.
WARPS = 3
KEYS, COLUMNS = 32, 16

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
    source_span, target_span = swizzle_span(columns), swizzle_span(keys)
    across = columns // COLUMNS
    units = across * (keys // KEYS)
    for i in cutlass.range_constexpr((units + WARPS - 1) // WARPS):
        unit = warp + i * WARPS
        if unit < units:
            key, column = unit // across * KEYS, unit % across * COLUMNS
            first, second, third, fourth = ptx.load_matrices_transposed(
                source + place_in_tile(key + lane, column, keys, source_span)
            )
            # Even columns, then odd ones, of each 16 keys.
            row = column + 2 * (lane % 8) + lane // 8 % 2
            slot = key + lane // 16 * CHUNK
            ptx.store_matrices(
                target + place_in_tile(row, slot, columns, target_span),
                Int32(cute.arch.prmt(first, second, 0x6420)),
                Int32(cute.arch.prmt(first, second, 0x7531)),
                Int32(cute.arch.prmt(third, fourth, 0x6420)),
                Int32(cute.arch.prmt(third, fourth, 0x7531)),
            )
