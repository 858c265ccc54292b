"""The online softmax of FP8: scores with a factor for each tile, probabilities that fill the range of e4m3.

As `fa3.kernels.parts.softmax`, with three differences. The reference is kept in log2 units, since the factor of the
scores may change from tile to tile. Probabilities are larger by a power of two, so that those at the limit at which
the reference moves come to the largest number of e4m3: the offset is lower by as much, which row sum and LSE follow.
And the row sums are products of the rounded probabilities with ones, by the tensor core, tile by tile: they cost the
warps nothing, and a row that one key dominates is divided by the very number that it was multiplied by.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa3.e4m3 import E4M3_MAX

from . import softmax
from .layout import ROWS_PER_THREAD
from .scales import Factors

#: Largest probability in log2 units.
ROOM = math.log2(E4M3_MAX)

#: Threshold of the first tile of keys: the scores of those to come may well be larger, and then need not move anything.
#: Wherever the largest score comes later, the reference has moved to it by the threshold of the spec.
FIRST_THRESHOLD = 3.8


@cute.jit
def quad_max_bits(bits: Int32) -> Int32:
    """Maximum over the four lanes that share a row."""
    bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1))
    return cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=2))


class State(softmax.State):
    """Softmax state of the rows that one thread holds.

    ``reference`` is the limit of scores in log2 units, at which a probability is the largest number of e4m3: ``ROOM``
    above ``offset``, but -inf where a row has seen no key.
    """

    @cute.jit
    def exceeded(self, largest: tuple[Int32, Int32]) -> Boolean:
        """Whether a row of this warp has a score beyond its limit; ``largest`` as `softmax.row_max_bits` has it."""
        beyond = (largest[0] >= self.limit_bits[0]) | (largest[1] >= self.limit_bits[1])
        return cute.arch.vote_any_sync(beyond)

    @cute.jit
    def set_limits(self, factor: Float32):
        """Set the limits of scores that have this factor."""
        inverse = cute.arch.rcp_approx(factor)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.limit_bits[r] = softmax.limit_of(self.reference[r] * inverse, Float32(0.0))

    @cute.jit
    def move_to(
        self,
        scores: cute.Tensor,
        largest: tuple[Int32, Int32],
        factor: Float32,
        threshold: cutlass.Constexpr,
    ):
        """Move the limits of the rows that have a score beyond theirs.

        ``self.factor`` is what the past is multiplied by. The largest score is then ``threshold`` below the limit, in
        log2 units, or so much more that its probability is a power of two, which e4m3 holds exactly. ``largest`` are
        the thread's largest scores as bits (`softmax.row_max_bits`), ``factor`` is that of the scores.
        """
        tops = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        bits = cute.recast_tensor(tops, Int32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            bits[r] = quad_max_bits(largest[r])
        # Bits are in order where a score is positive.
        if cute.arch.vote_any_sync(cutlass.min(bits[0], bits[1]) <= 0):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                tops[r] = softmax.quad_max_float(softmax.row_max_float(scores[r, None], -Float32.inf))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top, limit = tops[r] * factor, self.reference[r]
            beyond = not (top <= limit)  # NaN is
            offset = top - Float32(math.floor(ROOM - threshold))
            # A row without keys has nothing to keep.
            past = -Float32.inf if limit == -Float32.inf else self.offset[r]
            self.factor[r] = cute.math.exp2(past - offset, fastmath=True) if beyond else Float32(1.0)
            self.offset[r] = offset if beyond else self.offset[r]
            self.reference[r] = offset + Float32(ROOM) if beyond else limit
        self.set_limits(factor)

    @cute.jit
    def multiply(self, scale: Float32):
        """Let the output be multiplied by ``scale``, after ``sum_up`` and before ``normalize``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.factor[r] = self.factor[r] * scale

    @cute.jit
    def exponentiate_with(self, scores: cute.Tensor, factor: Float32, factors: Factors):
        """Turn a tile of scores into probabilities, times the share of its scale of v."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            offset = self.offset[r]
            if const_expr(factors.share_log2 is not None):
                offset = offset - factors.share_log2
            softmax.exponentiate(scores[r, None], factor, offset)

    @cute.jit
    def add_sums(self, sums: cute.Tensor, share_inverse: Float32 | None):
        """Add the row sums of a tile, an accumulator whose columns are alike."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            of_row = sums[2 * r]
            if const_expr(share_inverse is not None):
                of_row = of_row * share_inverse
            self.total[r] = self.total[r] + of_row

    @cute.jit
    def scale_total(self):
        """Let the row sums follow references that moved."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.total[r] = self.total[r] * self.factor[r]

    @cute.jit
    def sum_up(self):
        """The row sums are complete in every lane."""
        self.factor.fill(1.0)
