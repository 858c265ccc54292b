"""Online softmax over the register fragment of one warpgroup.

For each row, ``l`` is the sum of ``exp(scale * (s - m))``, as in the FlashAttention papers, but the reference
``m`` need not be the running maximum: any value does as long as no exponential overflows. So ``m`` stays
where it is until a score exceeds it by more than a threshold, and a tile that moves no row of a warp needs
neither the reduction over the lanes of a row nor a rescale of what was summed so far. Probabilities then
reach 2**threshold, which costs fp16 and bf16 no accuracy, since their precision is relative.

Scores stay unscaled; ``scale_log2`` is softmax_scale * log2(e), so that one fused multiply-add and one ex2
make each probability.
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

#: No signed integer is below it: a limit that every score reaches.
LOWEST = -(2**31)


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
def row_max_bits(bits: cute.Tensor) -> tuple[Int32, Int32]:
    """For each of the thread's two rows, the largest of its raw float bits as signed integers.

    It is the largest float if that is not negative; among negative floats the order runs backwards. Two
    nested maxima fuse into one three-input instruction, VIMNMX3, which float maxima do not have. Two chains for
    each row, side by side: none waits for its own last result.
    """
    rows = range(ROWS_PER_THREAD)
    best = [[bits[r, 0], bits[r, 1]] for r in rows]
    for i in cutlass.range_constexpr(2, cute.size(bits, mode=[1]), 2):
        for r in rows:
            chain = (i // 2) % 2
            best[r][chain] = cutlass.max(cutlass.max(best[r][chain], bits[r, i]), bits[r, i + 1])
    return cutlass.max(best[0][0], best[0][1]), cutlass.max(best[1][0], best[1][1])


@cute.jit
def exceeds(scores: cute.Tensor, limit_bits: cute.Tensor) -> Boolean:
    """Whether any score of the thread's rows reaches its row's limit (see ``limit_of``)."""
    upper, lower = row_max_bits(cute.recast_tensor(scores, Int32))
    return (upper >= limit_bits[0]) | (lower >= limit_bits[1])


@cute.jit
def limit_of(reference: Float32, margin: Float32) -> Int32:
    """Bits of ``reference + margin``, to be compared with the bits of scores as signed integers.

    A negative limit cannot be compared that way: it becomes the lowest integer, which every score reaches,
    so that the caller looks again with float maxima. So does -inf, the reference of a row without keys.
    """
    limit = reference + margin
    bits = cute.make_rmem_tensor(1, Int32)
    cute.recast_tensor(bits, Float32)[0] = limit
    return bits[0] if limit > Float32(0.0) else Int32(LOWEST)


@cute.jit
def quad_max_float(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


@cute.jit
def exponentiate(row: cute.Tensor, scale_log2: Float32, offset: Float32):
    """Replace the scores of a row by ``exp2(scale_log2 * score - offset)``."""
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
    """Softmax state of the rows that one thread holds.

    ``reference`` and ``offset`` (the reference times ``scale_log2``) are equal in the four lanes of a row;
    ``total`` is the sum over this thread's columns only.
    """

    reference: cute.Tensor
    offset: cute.Tensor
    limit_bits: cute.Tensor
    total: cute.Tensor
    factor: cute.Tensor
    scale_log2: Float32

    @classmethod
    def make(cls, scale_log2: Float32) -> State:
        """Registers for a state; see ``reset``."""
        reference, offset, total, factor = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(4))
        return cls(reference, offset, cute.make_rmem_tensor(ROWS_PER_THREAD, Int32), total, factor, scale_log2)

    @cute.jit
    def reset(self):
        """State of rows that have not seen a key: m = -inf, l = 0."""
        self.reference.fill(-Float32.inf)
        self.offset.fill(0.0)
        self.limit_bits.fill(LOWEST)
        self.total.fill(0.0)
        self.factor.fill(1.0)

    @cute.jit
    def must_move(self, scores: cute.Tensor) -> Boolean:
        """Whether a row of this warp, (2 rows, columns) a thread, has a score beyond its limit."""
        return cute.arch.vote_any_sync(exceeds(scores, self.limit_bits))

    @cute.jit
    def move(self, scores: cute.Tensor, threshold: cutlass.Constexpr):
        """Move the references to the running maxima; ``factor`` is what the past must be multiplied by."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            old = self.reference[r]
            new = quad_max_float(row_max_float(scores[r, None], old))
            # -inf as reference would make (-inf) - (-inf) of a score that is masked.
            offset = (Float32(0.0) if new == -Float32.inf else new) * self.scale_log2
            # What is summed so far is relative to the rounded offset. A row without keys has nothing to keep.
            past = -Float32.inf if old == -Float32.inf else self.offset[r]
            self.factor[r] = cute.math.exp2(past - offset, fastmath=True)
            self.total[r] = self.total[r] * self.factor[r]
            self.reference[r] = new
            self.offset[r] = offset
            self.limit_bits[r] = limit_of(new, Float32(threshold) / self.scale_log2)

    @cute.jit
    def exponentiate(self, scores: cute.Tensor):
        """Turn a tile of scores into probabilities and add them to the row sums."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            exponentiate(scores[r, None], self.scale_log2, self.offset[r])
            self.total[r] = self.total[r] + row_sum(scores[r, None])

    @cute.jit
    def sum_up(self):
        """Complete the row sums over the quad, at the end."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.total[r] = quad_sum(self.total[r])
            self.factor[r] = Float32(1.0)

    @cute.jit
    def add_sink(self, r: cutlass.Constexpr, sink_log2: Float32):
        """Let a logit without a value, in log2 units, enter the sum of row ``r``, after ``sum_up``.

        It may lie far above or below the reference, so the reference moves to the larger of both.
        """
        own = -Float32.inf if self.total[r] == Float32(0.0) else self.offset[r]
        top = cute.arch.fmax(own, sink_log2)
        top = Float32(0.0) if top == -Float32.inf else top
        self.factor[r] = cute.math.exp2(own - top, fastmath=True)
        # Of a sink of +inf nothing but itself is left, and inf - inf would be NaN.
        weight = Float32(1.0) if sink_log2 == top else cute.math.exp2(sink_log2 - top, fastmath=True)
        self.total[r] = self.total[r] * self.factor[r] + weight
        self.offset[r] = top

    @cute.jit
    def normalize(self, output: cute.Tensor):
        """Divide the output by the row sums; rows without keys stay 0."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.factor[r] = Float32(0.0) if self.total[r] == Float32(0.0) else self.factor[r] / self.total[r]
        scale_rows(output, self.factor)

    @cute.jit
    def log_sum_exp(self, r: cutlass.Constexpr) -> Float32:
        """Natural LSE of row ``r``, after ``sum_up``; -inf for a row without keys."""
        return (self.offset[r] + cute.math.log2(self.total[r], fastmath=True)) * LN_2
