"""What dQ by queries asks of scores, as a function of the host: a loop over threads that reads and writes tables.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from brick_wrappers import COLUMNS, WARPGROUP_THREADS, table
from fa3.kernels.parts import layout, query_scores, scores

REGISTERS = COLUMNS // 2
ROWS = 64


@cute.jit
def score_gradients(
    scores_address: Int64,
    dp_address: Int64,
    lse_address: Int64,
    delta_address: Int64,
    p_address: Int64,
    ds_address: Int64,
    scale_log2: Float32,
    mod_factor: Float32,
    batch: Int32,
    head: Int32,
    first_query: Int32,
    first_key: Int32,
    derivative: cutlass.Constexpr,
    capped: cutlass.Constexpr,
):
    """scores, dp (thread, register), lse and delta (ROWS,) -> P and dS (thread, register); scores are as given."""
    shape = (WARPGROUP_THREADS, REGISTERS)
    given, given_dp = table(scores_address, Float32, shape), table(dp_address, Float32, shape)
    all_lse, all_delta = table(lse_address, Float32, (ROWS,)), table(delta_address, Float32, (ROWS,))
    out_p, out_ds = table(p_address, Float32, shape), table(ds_address, Float32, shape)
    raw, p, ds = (cute.make_rmem_tensor(REGISTERS, Float32) for _ in range(3))
    lse, delta = (cute.make_rmem_tensor(layout.ROWS_PER_THREAD, Float32) for _ in range(2))
    of_mod = scores.find_mod(derivative)
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        lane = thread % 32
        row = layout.first_row(thread // 32, lane)
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            lse[r], delta[r] = all_lse[row + 8 * r], all_delta[row + 8 * r]
        for v in cutlass.range_constexpr(REGISTERS):
            raw[v], p[v], ds[v] = given[thread, v], given[thread, v], given_dp[thread, v]
        raw_view, p_view, ds_view = (layout.rows_and_columns(x) for x in (raw, p, ds))
        query_scores.exponentiate(p_view, scale_log2, lse)
        query_scores.score_gradients(p_view, ds_view, delta)
        queries = first_query + row, first_query + row + 8
        query_scores.before_changes(
            ds_view, raw_view, of_mod, mod_factor, capped, batch, head, queries,
            first_key + layout.first_column(lane), (),
        )  # fmt: skip
        for v in cutlass.range_constexpr(REGISTERS):
            out_p[thread, v], out_ds[thread, v] = p[v], ds[v]
