"""Online softmax over the register fragment of one warpgroup.

Notation of the FlashAttention papers: for each row, ``m`` is the reference (a running maximum of the raw
scores), ``l`` the sum of ``exp(scale * (s - m))``. Scores stay unscaled; ``scale_log2`` is
softmax_scale * log2(e), so that one fused multiply-add and one ex2 make each probability.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .layout import ROWS_PER_THREAD

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@cute.jit
def row_max_float(row: cute.Tensor, start: Float32) -> Float32:
    """Largest of ``start`` and the row's values, by floating-point max."""
    size = cute.size(row)
    even = start
    odd = Float32(row[0])
    for i in cutlass.range_constexpr(1, size, 2):
        even = cute.arch.fmax(even, row[i])
        if const_expr(i + 1 < size):
            odd = cute.arch.fmax(odd, row[i + 1])
    return cute.arch.fmax(even, odd)


@cute.jit
def row_max_bits(bits: cute.Tensor, start: Int32) -> Int32:
    """Largest of ``start`` and the row's raw float bits as signed integers.

    Two nested maxima fuse into one three-input VIMNMX3. The order of the integers is the order of the
    floats as long as the result is not negative; a caller that gets a negative one must ask
    ``row_max_float`` instead.
    """
    best = [start, bits[0]]
    for i in cutlass.range_constexpr(1, cute.size(bits), 2):
        chain = (i // 2) % 2
        best[chain] = cutlass.max(best[chain], bits[i])
        if const_expr(i + 1 < cute.size(bits)):
            best[chain] = cutlass.max(best[chain], bits[i + 1])
    return cutlass.max(best[0], best[1])


@cute.jit
def quad_max_float(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def quad_max_int(value: Int32) -> Int32:
    """Maximum over the four lanes that share a row."""
    value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


@cute.jit
def running_max(scores: cute.Tensor, reference: cute.Tensor, result: cute.Tensor, integer_max: cutlass.Constexpr):
    """Write max(reference, scores of the row over its quad) of both rows into ``result``."""
    if const_expr(integer_max):
        bits = cute.recast_tensor(scores, Int32)
        reference_bits = cute.recast_tensor(reference, Int32)
        result_bits = cute.recast_tensor(result, Int32)
        for r in cutlass.range_constexpr(cute.size(reference)):
            result_bits[r] = quad_max_int(row_max_bits(bits[r, None], reference_bits[r]))
        smallest = result_bits[0]
        for r in cutlass.range_constexpr(1, cute.size(reference)):
            smallest = cutlass.min(smallest, result_bits[r])
        # Negative floats compare the wrong way round as integers: take the float maximum instead. The
        # vote keeps the branch uniform, since the shuffles inside need every lane.
        if cute.arch.vote_any_sync(smallest < 0):
            for r in cutlass.range_constexpr(cute.size(reference)):
                result[r] = quad_max_float(row_max_float(scores[r, None], reference[r]))
    else:
        for r in cutlass.range_constexpr(cute.size(reference)):
            result[r] = quad_max_float(row_max_float(scores[r, None], reference[r]))


@cute.jit
def move_reference(
    largest: cute.Tensor,
    reference: cute.Tensor,
    factor: cute.Tensor,
    scale_log2: Float32,
    threshold: cutlass.Constexpr,
) -> Boolean:
    """Set each row's reference and the factor that what was summed so far must be multiplied by.

    The reference need not be the true maximum: it is kept while the running maximum exceeds it by at most
    ``threshold`` in log2 units, so that probabilities reach at most 2**threshold. A reference of -inf
    always moves. Returns whether any row of this thread moved.
    """
    moved = Boolean(False)
    for r in cutlass.range_constexpr(cute.size(reference)):
        old = reference[r]
        new = largest[r]
        if const_expr(threshold > 0):
            # (-inf) - (-inf) is NaN, and a comparison with NaN is false: such a row does not move.
            new = new if (new - old) * scale_log2 > Float32(threshold) else old
        # A row that has not seen a key yet has nothing to rescale, and must not form (-inf) - (-inf).
        factor[r] = cute.math.exp2((old - finite_or_zero(new)) * scale_log2, fastmath=True)
        moved = moved | (new != old)
        reference[r] = new
    return moved


@cute.jit
def finite_or_zero(value: Float32) -> Float32:
    """``value``, or 0 in place of -inf: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN."""
    return Float32(0.0) if value == -Float32.inf else value


@cute.jit
def exponentiate(scores: cute.Tensor, reference: cute.Tensor, scale_log2: Float32):
    """Replace the scores by ``exp2(scale_log2 * (score - reference))``."""
    for r in cutlass.range_constexpr(cute.size(reference)):
        offset = finite_or_zero(reference[r]) * scale_log2
        row = scores[r, None]
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i] = cute.math.exp2(row[i] * scale_log2 - offset, fastmath=True)


@cute.jit
def row_sum(row: cute.Tensor) -> Float32:
    """Sum of this thread's values of a row, in two chains so that additions overlap."""
    even = row[0]
    odd = row[1]
    for i in cutlass.range_constexpr(2, cute.size(row), 2):
        even = even + row[i]
        odd = odd + row[i + 1]
    return even + odd


@cute.jit
def scale_rows(accumulator: cute.Tensor, factor: cute.Tensor):
    """Multiply each row of an accumulator by its factor."""
    for r in cutlass.range_constexpr(cute.size(factor)):
        row = accumulator[r, None]
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i] = row[i] * factor[r]


class State(NamedTuple):
    """Softmax state of the rows that one thread holds."""

    reference: cute.Tensor
    total: cute.Tensor
    factor: cute.Tensor
    scale_log2: Float32
    moved: cute.Tensor

    @staticmethod
    def fresh(scale_log2: Float32) -> State:
        """State of rows that have not seen a key: m = -inf, l = 0."""
        reference, total, factor = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(3))
        moved = cute.make_rmem_tensor(1, Int32)
        reference.fill(-Float32.inf)
        total.fill(0.0)
        factor.fill(1.0)
        moved.fill(0)
        return State(reference, total, factor, scale_log2, moved)

    @cute.jit
    def update(self, scores: cute.Tensor, threshold: cutlass.Constexpr, integer_max: cutlass.Constexpr):
        """Take in one tile of scores, (2 rows, columns), and leave its probabilities in their place."""
        largest = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        running_max(scores, self.reference, largest, integer_max)
        moved = move_reference(largest, self.reference, self.factor, self.scale_log2, threshold)
        self.moved[0] = Int32(moved)
        exponentiate(scores, self.reference, self.scale_log2)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.total[r] = self.total[r] * self.factor[r] + row_sum(scores[r, None])

    @cute.jit
    def rescale(self, output: cute.Tensor, threshold: cutlass.Constexpr):
        """Bring the output, (2 rows, columns), to the reference of the last update."""
        if const_expr(threshold > 0):
            if cute.arch.vote_any_sync(self.moved[0] != 0):
                scale_rows(output, self.factor)
        else:
            scale_rows(output, self.factor)

    @cute.jit
    def normalize(self, output: cute.Tensor):
        """Complete the row sums over the quad and divide the output by them; rows without keys stay 0."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = quad_sum(self.total[r])
            self.total[r] = total
            self.factor[r] = Float32(0.0) if total == Float32(0.0) else 1.0 / total
        scale_rows(output, self.factor)

    @cute.jit
    def log_sum_exp(self, r: cutlass.Constexpr, softmax_scale: Float32) -> Float32:
        """Natural LSE of row ``r``, after ``normalize``; -inf for a row without keys."""
        return self.reference[r] * softmax_scale + cute.math.log2(self.total[r], fastmath=True) * LN_2
