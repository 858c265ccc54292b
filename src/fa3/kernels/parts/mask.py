"""Which keys a query row sees, and which key tiles a query tile needs.

Causal masks are aligned bottom-right: query i sees key j when j <= i + seqlen_k - seqlen_q.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .layout import ROWS_PER_THREAD, column_in_tile


@cute.jit
def visible_keys(row: Int32, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr) -> Int32:
    """Number of keys, counted from key 0, that query ``row`` sees; may be negative."""
    if const_expr(causal):
        return cutlass.min(seqlen_k, row + 1 + seqlen_k - seqlen_q)
    else:
        return seqlen_k


@cute.jit
def key_tiles(
    last_row: Int32, seqlen_q: Int32, seqlen_k: Int32, tile_n: cutlass.Constexpr, causal: cutlass.Constexpr
) -> Int32:
    """Number of key tiles, counted from tile 0, that hold a key which ``last_row`` or a row above it sees."""
    keys = cutlass.max(visible_keys(last_row, seqlen_q, seqlen_k, causal), 0)
    return (keys + tile_n - 1) // tile_n


@cute.jit
def whole_key_tiles(
    first_row: Int32, seqlen_q: Int32, seqlen_k: Int32, tile_n: cutlass.Constexpr, causal: cutlass.Constexpr
) -> Int32:
    """Number of key tiles, counted from tile 0, of which ``first_row`` and all rows below it see every key."""
    keys = cutlass.max(visible_keys(first_row, seqlen_q, seqlen_k, causal), 0)
    return keys // tile_n


@cute.jit
def mask_scores(
    scores: cute.Tensor,
    first_row: Int32,
    first_key: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    causal: cutlass.Constexpr,
):
    """Set the scores of keys that a row does not see to -inf.

    ``scores`` is the thread's (2 rows, columns) view; its rows are ``first_row`` and ``first_row + 8``,
    its column ``c`` is key ``first_key + column_in_tile(c)``.
    """
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        limit = visible_keys(first_row + 8 * r, seqlen_q, seqlen_k, causal) - first_key
        row = scores[r, None]
        for c in cutlass.range_constexpr(cute.size(row)):
            row[c] = row[c] if Int32(column_in_tile(c)) < limit else -Float32.inf
