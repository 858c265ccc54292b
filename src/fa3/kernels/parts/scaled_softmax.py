"""The online softmax of FP8: scores with a factor for each tile, probabilities that fill the range of e4m3.

As `fa3.kernels.parts.softmax`, with two differences. The reference is kept in log2 units, since the factor of the
scores may change from tile to tile. And probabilities are larger by a power of two, so that those at the limit at which
the reference moves come to the largest number of e4m3: the offset is lower by as much, which row sum and LSE follow.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from . import softmax
from .layout import ROWS_PER_THREAD
from .scales import Factors

#: Largest probability in log2 units: e4m3 reaches 448.
ROOM = math.log2(448.0)


class State(softmax.State):
    """Softmax state of the rows that one thread holds; ``reference`` is in log2 units."""

    @cute.jit
    def must_move_to(self, scores: cute.Tensor, factor: Float32) -> Boolean:
        """Whether a row of this warp, (2 rows, columns) a thread, has a score beyond its limit."""
        inverse = cute.arch.rcp_approx(factor)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            # -inf where the row has seen no key: then every score is beyond it.
            seen = self.reference[r] != -Float32.inf
            limit = (self.offset[r] + Float32(ROOM)) * inverse if seen else -Float32.inf
            self.limit_bits[r] = softmax.limit_of(limit, Float32(0.0))
        return cute.arch.vote_any_sync(softmax.exceeds(scores, self.limit_bits))

    @cute.jit
    def move_to(self, scores: cute.Tensor, factor: Float32, threshold: cutlass.Constexpr):
        """Move the references to the running maxima; ``factor`` is what the past must be multiplied by."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            old = self.reference[r]
            top = softmax.row_max_float(scores[r, None], -Float32.inf) * factor
            new = softmax.quad_max_float(cute.arch.fmax(top, old))
            # -inf as reference would make (-inf) - (-inf) of a score that is masked.
            offset = (Float32(0.0) if new == -Float32.inf else new) - Float32(ROOM - threshold)
            past = -Float32.inf if old == -Float32.inf else self.offset[r]
            self.factor[r] = cute.math.exp2(past - offset, fastmath=True)
            self.total[r] = self.total[r] * self.factor[r]
            self.reference[r] = new
            self.offset[r] = offset

    @cute.jit
    def multiply(self, scale: Float32):
        """Let the output be multiplied by ``scale``, after ``sum_up`` and before ``normalize``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.factor[r] = self.factor[r] * scale

    @cute.jit
    def exponentiate_with(self, scores: cute.Tensor, factor: Float32, factors: Factors):
        """Turn a tile of scores into probabilities, times the share of its scale of v, and add up the row sums."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if const_expr(factors.share_log2 is None):
                softmax.exponentiate(scores[r, None], factor, self.offset[r])
                self.total[r] = self.total[r] + softmax.row_sum(scores[r, None])
            else:
                softmax.exponentiate(scores[r, None], factor, self.offset[r] - factors.share_log2)
                self.total[r] = self.total[r] + softmax.row_sum(scores[r, None]) * factors.share_inverse
