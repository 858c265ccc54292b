"""What a thread keeps for the rotary embeddings of all heads: cos and sin of its pairs, with signs in them.

They are the same for every head, and so is which of its elements change their signs. A thread reads them once, and
keeps them in shared memory, in words of its own that no other thread reads: 16 bytes at a time, those of neighbours
next to each other.

With s and t the signs of a pair (x, y), its values with their signs are
``s (x cos - y sin) = x (s cos) - (s t y) (t sin)`` and ``t (y cos + x sin) = (s t y) (s cos) + x (t sin)``: with s in
cos and t in sin only y is left to change its sign, where s and t differ. So are they the same numbers bit for bit.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa3.spec import QuantizeSpec

from . import rotation


class Angles:
    """Device code of a ``QuantizeSpec`` with a ``rope``.

    ``angles`` are (4, words / 4) float32 of one thread: of one piece, or of two that are embedded together, the
    cosines and then the sines, before those of the next. ``masks`` are (4, words / 4): `rotation.mask_of_pair` of
    words of elements, the same for all units.
    """

    def __init__(self, spec: QuantizeSpec, dtype: type[cutlass.Numeric]):
        self.spec = spec
        #: Of the tables.
        self.dtype = Float32 if spec.rope == "fp32" else dtype
        #: Words of a thread.
        self.words = spec.units * spec.held if spec.rope else 0
        self.mask_words = spec.signs_kept
        #: Cosines of a piece, or of two that are embedded together, and how often a unit has such.
        self.count = spec.piece // 2 if spec.interleaved else spec.piece
        self.groups = spec.held // (2 * self.count)

    def of_thread(self, table: Any, count: int, thread: Int32) -> cute.Tensor | None:
        """The thread's own words in shared memory, (4, count / 4): neighbours read 16 bytes next to each other."""
        if count == 0:
            return None
        threads = self.spec.threads
        return table.get_tensor(cute.make_layout((4, count // 4, threads), stride=(1, 4 * threads, 4)))[
            None, None, thread
        ]

    @cute.jit
    def keep_masks(self, flips: list, masks: cute.Tensor | None):
        """Work out ``masks`` from the signs of pieces (`rotation.signs_of_piece`), if there are any."""
        if const_expr(self.spec.rotate):
            if const_expr(self.spec.interleaved):
                flips = [rotation.second_of_pairs(signs) for signs in flips]
            else:
                flips = [flips[i] ^ flips[i + self.groups] for i in range(self.groups)]
            words = self.spec.piece // 2
            for i in cutlass.range_constexpr(self.mask_words):
                masks[i % 4, i // 4] = rotation.mask_of_pair(flips[i // words], i % words)

    def masks_of_piece(self, masks: cute.Tensor | None, index: int) -> list | None:
        """Those of a piece of a unit, if its elements change their signs; of halves only the second does."""
        words = self.spec.piece // 2
        index -= self.spec.held // self.spec.piece - self.mask_words // words
        if masks is None or index < 0:
            return None
        found = cute.make_rmem_tensor((4, words // 4), Int32)
        for n in range(words // 4):
            cute.autovec_copy(masks[None, index * words // 4 + n], found[None, n])
        return [found[i % 4, i // 4] for i in range(words)]

    @cute.jit
    def load(
        self,
        tables: tuple[Int64, Int64],
        first_position: Int32,
        rows: list,
        seqlen: Int32,
        thread: Int32,
        flips: list,
        angles: cute.Tensor,
    ):
        """Bring cos and sin of the thread's pairs to ``angles``; 0 where there is no row.

        Args:
            tables: addresses of cos and sin, each (positions, head_dim / 2).
            first_position: of row 0.
            rows: the row of each unit of the thread; none from ``seqlen`` on.
            flips: the signs of each piece, as `rotation.signs_of_piece` has them.
        """
        spec = self.spec
        count, groups = self.count, self.groups
        for unit in cutlass.range_constexpr(spec.units):
            place = Int64(first_position + rows[unit]) * (spec.head_dim // 2)
            for i in cutlass.range_constexpr(groups):
                at = place + count * (thread % spec.across + spec.across * i)
                for table in cutlass.range_constexpr(2):
                    found = cute.make_rmem_tensor(count, Float32)
                    found.fill(0.0)
                    if rows[unit] < seqlen:
                        self.load_table(tables[table], at, found)
                    for n in cutlass.range_constexpr(count):
                        angle = found[n]
                        if const_expr(spec.rotate):
                            if const_expr(spec.interleaved):
                                angle = rotation.flip(angle, flips[i], 2 * n + table)
                            else:
                                angle = rotation.flip(angle, flips[i + table * groups], n)
                        angles[n % 4, ((unit * groups + i) * 2 + table) * count // 4 + n // 4] = angle

    @cute.jit
    def load_table(self, address: Int64, place: Int64, target: cute.Tensor):
        """As many cosines or sines as ``target`` has, in float32."""
        count = cute.size(target)
        dtype = self.dtype
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=min(count * dtype.width // 8, 16))
        source = cute.make_tensor(pointer + cute.assume(place, divby=count), cute.make_layout(count))
        raw = cute.make_rmem_tensor(count, dtype)
        cute.autovec_copy(source, raw)
        for i in cutlass.range_constexpr(count):
            target[i] = Float32(raw[i])

    @cute.jit
    def embed(self, values: cute.Tensor, angles: cute.Tensor, unit: cutlass.Constexpr, index: cutlass.Constexpr):
        """Rotary embedding of one piece of a unit, or of that and its partner in the other half of the row."""
        spec = self.spec
        count, groups = self.count, self.groups
        both = cute.make_rmem_tensor((4, count // 2), Float32)
        start = (unit * groups + index) * count // 2
        for n in cutlass.range_constexpr(count // 2):
            cute.autovec_copy(angles[None, start + n], both[None, n])
        cos = cute.make_tensor(both.iterator, cute.make_layout(count))
        sin = cute.make_tensor(both.iterator + count, cute.make_layout(count))
        first = unit * spec.held + spec.piece * index
        if const_expr(spec.interleaved):
            rotation.rotate_pairs(values, first, 1, 2, cos, sin)
        else:
            rotation.rotate_pairs(values, first, spec.held // 2, 1, cos, sin)
