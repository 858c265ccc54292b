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

    # The backward walks down the queries that see a tile of keys; those that see one key are an interval too.

    @cute.jit
    def first_query(self, key: Int32, kind: cutlass.Constexpr) -> Int32:
        """The first query that sees a key, if one does."""
        if const_expr(kind == "causal"):
            return cutlass.max(key + self.seqlen_q - self.seqlen_k, 0)
        elif const_expr(kind == "window"):
            position = key - self.right
            if self.chunk > 0:
                position = cutlass.max(position, key // self.chunk * self.chunk)
            return cutlass.max(position + self.seqlen_q - self.seqlen_k, 0)
        else:
            return Int32(0)

    @cute.jit
    def end_query(self, key: Int32, kind: cutlass.Constexpr) -> Int32:
        """One past the last query that sees a key; not above ``first_query``, and maybe negative, if none does."""
        if const_expr(kind == "window"):
            position = key + self.left + 1
            if self.chunk > 0:
                position = cutlass.min(position, (key // self.chunk + 1) * self.chunk)
            return cutlass.min(self.seqlen_q, position + self.seqlen_q - self.seqlen_k)
        else:
            return self.seqlen_q

    @cute.jit
    def query_tiles(
        self, first_key: Int32, last_key: Int32, tile_m: cutlass.Constexpr, kind: cutlass.Constexpr
    ) -> tuple[Int32, Int32]:
        """(first, one past the last) query tile with a query that sees a key of this range; equal if none does."""
        begin = self.first_query(first_key, kind) // tile_m
        end = (cutlass.max(self.end_query(last_key, kind), 0) + tile_m - 1) // tile_m
        return begin, cutlass.max(end, begin)

    @cute.jit
    def whole_query_tiles(
        self, first_key: Int32, last_key: Int32, tile_m: cutlass.Constexpr, kind: cutlass.Constexpr
    ) -> tuple[Int32, Int32]:
        """(first, one past the last) query tile whose every query sees every key of this range."""
        begin = (self.first_query(last_key, kind) + tile_m - 1) // tile_m
        return begin, cutlass.max(self.end_query(first_key, kind), 0) // tile_m

    @cute.jit
    def hide_queries(
        self,
        scores: cute.Tensor,
        keys: tuple[Int32, Int32],
        first_query: Int32,
        kind: cutlass.Constexpr,
    ):
        """As `hide`, of transposed scores: the rows are ``keys``, column ``c`` is a query counted from ``first_query``.

        Keys behind the last one are hidden too. Queries behind the last one may be left as they are.
        """
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = scores[r, None]
            begin, end = Int32(0), Int32(cute.size(row))
            if const_expr(kind != "full" and kind != "blocks"):
                begin = columns_before(self.first_query(keys[r], kind) - first_query)
            if const_expr(kind == "window"):
                end = columns_before(self.end_query(keys[r], kind) - first_query)
            if keys[r] >= self.seqlen_k:
                end = Int32(0)
            for word in cutlass.range_constexpr((cute.size(row) + 31) // 32):
                bits = lowest_bits(end - 32 * word)
                if const_expr(kind != "full" and kind != "blocks"):
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
