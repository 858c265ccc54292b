"""Which keys a query sees, and which key tiles a query tile needs.

Masks are aligned bottom-right: query i is at key position p = i + seqlen_k - seqlen_q. A query sees one interval of
keys, and both its ends only grow with the query, so the keys of a tile of queries are an interval too:

- ``full``: all keys;
- ``causal``: j <= p;
- ``window``: p - left <= j <= p + right, and only in the chunk that p is in, if there are chunks.

``blocks`` is ``full`` here: its lists of blocks are looked up elsewhere.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from .layout import ROWS_PER_THREAD


class Mask(NamedTuple):
    """Lengths and bounds. ``left`` and ``right`` are at most the lengths; ``chunk`` 0 means none."""

    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32
    right: Int32
    chunk: Int32

    @cute.jit
    def first_key(self, query: Int32, kind: cutlass.Constexpr) -> Int32:
        """The first key that a query sees, if it sees any."""
        if const_expr(kind == "window"):
            position = query + self.seqlen_k - self.seqlen_q
            first = position - self.left
            if self.chunk > 0:
                first = cutlass.max(first, cutlass.max(position, 0) // self.chunk * self.chunk)
            return cutlass.max(first, 0)
        else:
            return Int32(0)

    @cute.jit
    def end_key(self, query: Int32, kind: cutlass.Constexpr) -> Int32:
        """One past the last key that a query sees; not above ``first_key``, and maybe negative, if it sees none."""
        if const_expr(kind == "causal"):
            return cutlass.min(self.seqlen_k, query + 1 + self.seqlen_k - self.seqlen_q)
        elif const_expr(kind == "window"):
            position = query + self.seqlen_k - self.seqlen_q
            end = cutlass.min(self.seqlen_k, position + self.right + 1)
            if self.chunk > 0:
                # Before key 0 there are chunks too, but no keys in them.
                chunk_end = (cutlass.max(position, 0) // self.chunk + 1) * self.chunk
                end = cutlass.min(end, chunk_end if position >= 0 else Int32(0))
            return end
        else:
            return self.seqlen_k

    @cute.jit
    def key_tiles(
        self, first_query: Int32, last_query: Int32, tile_n: cutlass.Constexpr, kind: cutlass.Constexpr
    ) -> tuple[Int32, Int32]:
        """(first, one past the last) key tile with a key that a query of this range sees; equal if there is none."""
        begin = self.first_key(first_query, kind) // tile_n
        end = (cutlass.max(self.end_key(last_query, kind), 0) + tile_n - 1) // tile_n
        return begin, cutlass.max(end, begin)

    @cute.jit
    def whole_key_tiles(
        self, first_query: Int32, last_query: Int32, tile_n: cutlass.Constexpr, kind: cutlass.Constexpr
    ) -> tuple[Int32, Int32]:
        """(first, one past the last) key tile of which every query of this range sees every key."""
        begin = (self.first_key(last_query, kind) + tile_n - 1) // tile_n
        return begin, cutlass.max(self.end_key(first_query, kind), 0) // tile_n

    @cute.jit
    def hide(
        self,
        scores: cute.Tensor,
        queries: tuple[Int32, Int32],
        first_key: Int32,
        kind: cutlass.Constexpr,
    ):
        """Set the scores of keys that a query does not see to -inf.

        ``scores`` is the thread's (2 rows, columns) view; its rows are ``queries``, its column ``c`` is key
        ``first_key + column_in_tile(c)``.
        """
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = scores[r, None]
            end = columns_before(self.end_key(queries[r], kind) - first_key)
            begin = Int32(0)
            if const_expr(kind == "window"):
                begin = columns_before(self.first_key(queries[r], kind) - first_key)
            for word in cutlass.range_constexpr((cute.size(row) + 31) // 32):
                bits = lowest_bits(end - 32 * word)
                if const_expr(kind == "window"):
                    bits = bits & ~lowest_bits(begin - 32 * word)
                for c in cutlass.range_constexpr(32 * word, min(32 * word + 32, cute.size(row))):
                    row[c] = row[c] if bits & Uint32(1 << (c % 32)) != Uint32(0) else -Float32.inf


@cute.jit
def columns_before(key: Int32) -> Int32:
    """How many of a thread's columns lie before the ``key``-th key after the first column; see ``column_in_tile``."""
    key = cutlass.max(key, 0)
    return 2 * (key // 8) + cutlass.min(key % 8, 2)


@cute.jit
def lowest_bits(count: Int32) -> Uint32:
    """A word whose lowest ``count`` bits are set: none below 1, all from 32 on.

    One word says of 32 columns whether they are seen. The assembler turns the tests of its bits into predicates, many
    at once, where comparing each column with a bound costs an instruction of its own.
    """
    some = Uint32((Uint32(1) << Uint32(cutlass.min(cutlass.max(count, 0), 31))) - Uint32(1))
    return Uint32(0xFFFFFFFF) if count >= 32 else some
