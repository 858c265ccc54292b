"""Probabilities and dS of scores that are queries by keys, in the registers of a thread.

`fa3.kernels.parts.gradients` has the same of transposed scores. Here what belongs to a query, its LSE and delta,
belongs to a row. ``view`` is the thread's (2 rows, columns) of an accumulator.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import layout, ptx, softmax


@cute.jit
def exponentiate(view: cute.Tensor, scale_log2: Float32, lse: cute.Tensor):
    """Replace each score s by P = ``exp2(scale_log2 * s - lse)``."""
    for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
        softmax.exponentiate(view[r, None], scale_log2, lse[r])


@cute.jit
def keep_before_here(p: cute.Tensor):
    """Keep the making of P above this point of the program; see `fa3.kernels.parts.ptx.keep_before_here`."""
    bits = cute.recast_tensor(p, Int32)
    # The sign of any of them. The assembler makes one instruction of two of these.
    every = bits[0, 0]
    for c in cutlass.range_constexpr(cute.size(bits, mode=[1])):
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            every = every | bits[r, c]
    ptx.keep_before_here(every.bitcast(Float32))


@cute.jit
def score_gradients(p: cute.Tensor, view: cute.Tensor, delta: cute.Tensor):
    """Replace dP by dS = P * (dP - delta)."""
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            view[r, c] = p[r, c] * (view[r, c] - delta[r])


@cute.jit
def before_changes(
    view: cute.Tensor,
    raw: cute.Tensor,
    derivative: cutlass.Constexpr,
    mod_factor: Float32,
    capped: cutlass.Constexpr,
    batch: Int32,
    head: Int32,
    queries: tuple[Int32, Int32],
    first_key: Int32,
    aux: tuple,
):
    """Turn dS into that of the scores before a score_mod and softcap; ``raw`` is what derivatives are taken at."""
    for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
        key = first_key + Int32(layout.column_in_tile(c))
        for r in cutlass.range_constexpr(layout.ROWS_PER_THREAD):
            if const_expr(derivative is not None):
                score = raw[r, c] * mod_factor
                view[r, c] = Float32(derivative(view[r, c], score, batch, head, queries[r], key, aux))
            if const_expr(capped):
                view[r, c] = view[r, c] * (1.0 - raw[r, c] * raw[r, c])
