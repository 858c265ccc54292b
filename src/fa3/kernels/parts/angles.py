"""What a thread keeps for the rotary embeddings of all heads: cos and sin of its pairs, with signs in them.

They are the same for every head, and so is which of its elements change their signs. A thread reads them once, and
keeps them in registers: as many of them as it has elements of a head.

With s and t the signs of a pair (x, y), its values with their signs are
``s (x cos - y sin) = x (s cos) - (s t y) (t sin)`` and ``t (y cos + x sin) = (s t y) (s cos) + x (t sin)``: with s in
cos and t in sin only y is left to change its sign, where s and t differ. So are they the same numbers bit for bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa3.spec import QuantizeSpec

from . import rotation


class Angles:
    """Device code of a ``QuantizeSpec`` with a ``rope``.

    ``angles`` are (count, 2, groups) float32 of one thread: of one piece, or of two that are embedded together, the
    cosines and then the sines, before those of the next.
    """

    def __init__(self, spec: QuantizeSpec, dtype: type[cutlass.Numeric]):
        self.spec = spec
        #: Of the tables.
        self.dtype = Float32 if spec.rope == "fp32" else dtype
        #: Cosines of a piece, or of two that are embedded together, and how often a row has such in a thread.
        self.count = spec.piece // 2 if spec.interleaved else spec.piece
        self.groups = spec.held // (2 * self.count)

    def flips_of_second(self, flips: list) -> list:
        """From the signs of each piece (`rotation.signs_of_piece`) those of its elements that are left to change."""
        if not self.spec.rotate:
            return flips
        if self.spec.interleaved:
            return [rotation.second_of_pairs(signs) for signs in flips]
        return [None] * self.groups + [flips[i] ^ flips[i + self.groups] for i in range(self.groups)]

    @cute.jit
    def load(
        self,
        tables: tuple[Int64, Int64],
        first_position: Int32,
        row: Int32,
        seqlen: Int32,
        thread: Int32,
        flips: list,
    ) -> cute.Tensor:
        """Bring cos and sin of the thread's pairs; 0 where there is no row.

        Args:
            tables: addresses of cos and sin, each (positions, head_dim / 2).
            first_position: of row 0.
            row: the thread's; none from ``seqlen`` on.
            flips: the signs of each piece, as `rotation.signs_of_piece` has them.
        """
        spec = self.spec
        count, groups = self.count, self.groups
        angles = cute.make_rmem_tensor((count, 2, groups), Float32)
        raw = cute.make_rmem_tensor((count, 2, groups), self.dtype)
        raw.fill(0.0)
        place = Int64(first_position + row) * (spec.head_dim // 2)
        if row < seqlen:
            for i in cutlass.range_constexpr(groups):
                at = place + count * (thread % spec.across + spec.across * i)
                for table in cutlass.range_constexpr(2):
                    self.load_table(tables[table], at, raw[None, table, i])
        for i in cutlass.range_constexpr(groups):
            for table in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(count):
                    angle = Float32(raw[n, table, i])
                    if const_expr(spec.rotate):
                        if const_expr(spec.interleaved):
                            angle = rotation.flip(angle, flips[i], 2 * n + table)
                        else:
                            angle = rotation.flip(angle, flips[i + table * groups], n)
                    angles[n, table, i] = angle
        return angles

    @cute.jit
    def load_table(self, address: Int64, place: Int64, target: cute.Tensor):
        """As many cosines or sines as ``target`` has."""
        dtype, count = self.dtype, self.count
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=min(count * dtype.width // 8, 16))
        source = cute.make_tensor(pointer + cute.assume(place, divby=count), cute.make_layout(count))
        cute.autovec_copy(source, target)

    @cute.jit
    def embed(self, values: cute.Tensor, angles: cute.Tensor, index: cutlass.Constexpr):
        """Rotary embedding of one piece, or of that and its partner in the other half of the row."""
        spec = self.spec
        cos, sin = angles[None, 0, index], angles[None, 1, index]
        first = spec.piece * index
        if const_expr(spec.interleaved):
            rotation.rotate_pairs(values, first, 1, 2, cos, sin)
        else:
            rotation.rotate_pairs(values, first, spec.held // 2, 1, cos, sin)
