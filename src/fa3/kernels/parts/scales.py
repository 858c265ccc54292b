"""Scales of FP8 tensors: where they lie, and what they do to the scores and to the output.

An element of q, k or v stands for itself times the scale of its block of rows, or of its head. The scales of q and k
become part of the factor that the softmax has anyway. That of a tile of v becomes part of its probabilities, relative
to the largest of the head, which keeps them in range, and the largest comes back once at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

#: Bounds of the product of the scales of q and k, where it does not meet the softmax scale first. Above and below it
#: the softmax is that of the bound, where products beyond float32 would make NaN.
LEAST_FACTOR, LARGEST_FACTOR = 2.0**-80, 2.0**64

#: Bounds of that times the softmax scale in log2 units, of sums of e4m3 and of int8 products: scores then are below
#: 2**27, where float32 still tells them from their reference to within the range of e4m3. Above, one key rules each row
#: either way.
LEAST_SCALE, LARGEST_SCALE, LARGEST_SCALE_OF_INT8 = 2.0**-100, 2.0, 32.0

#: Least share that the scale of a tile of v has in the largest of its head: its probabilities round to 0 far above it.
LEAST_SHARE = 2.0**-40


class Scales(NamedTuple):
    """Where the scales lie: (address, batch stride, head stride, block stride) each.

    An address of 0 means 1; with blocks all but that of q are there, of v one for each head or for each block.
    """

    q: tuple
    k: tuple
    v: tuple
    #: With blocks of v: the largest scale of each head, (batch, heads_kv).
    largest: tuple
    #: Queries of a block.
    query_block: Int32
    #: Query heads that share a scale of q.
    query_heads: Int32

    @staticmethod
    def of_numbers(numbers: tuple) -> Scales:
        """From the extra arguments of a launch, in the order of ``SCALE_TYPES``."""
        q, k, v, largest = (tuple(numbers[4 * i : 4 * i + 4]) for i in range(4))
        return Scales(q, k, v, largest, *numbers[16:])


#: Types of the extra arguments.
SCALE_TYPES = (Int64,) * 16 + (Int32,) * 2


class Factors(NamedTuple):
    """What the scales make of one tile of scores."""

    #: Product of the scales of q and k.
    scores: Float32
    #: With blocks of v: the tile's share in the largest scale of v in log2 units, and the inverse of the share.
    share_log2: Float32 | None
    share_inverse: Float32 | None


@cute.jit
def address_of_head(of: tuple, batch_index: Int32, head: Int32) -> Int64:
    """Where the scales of a head's blocks begin."""
    address, batch_stride, head_stride, _ = of
    return address + 4 * (Int64(batch_index) * batch_stride + Int64(head) * head_stride)


@cute.jit
def read_block(address: Int64, of: tuple, block: Int32) -> Float32:
    """The scale of a block of the head whose scales begin at ``address``."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer + Int64(block) * of[3], cute.make_layout(1))[0]


@cute.jit
def read(of: tuple, batch_index: Int32, head: Int32, block: Int32) -> Float32:
    """One scale, 1 where there are none."""
    address, batch_stride, head_stride, block_stride = of
    value = Float32(1.0)
    if address != 0:
        place = Int64(batch_index) * batch_stride + Int64(head) * head_stride + Int64(block) * block_stride
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        value = cute.make_tensor(pointer + place, cute.make_layout(1))[0]
    return value


@cute.jit
def bounded(value: Float32, least: cutlass.Constexpr, largest: cutlass.Constexpr) -> Float32:
    """``value`` kept in bounds; NaN stays NaN."""
    return -cute.arch.fmax(-cute.arch.fmax(value, Float32(least), nan=True), Float32(-largest), nan=True)


@cute.jit
def bounded_factor(factor: Float32) -> Float32:
    """The product of the scales of q and k, kept in bounds."""
    return bounded(factor, LEAST_FACTOR, LARGEST_FACTOR)


@cute.jit
def share_of(v_scale: Float32, largest: Float32) -> tuple[Float32, Float32]:
    """The share of a scale in the largest of its head, in log2 units, and the inverse of the share."""
    share = bounded(v_scale * inverse(largest), LEAST_SHARE, 1.0)
    return cute.math.log2(share, fastmath=True), cute.arch.rcp_approx(share)


@cute.jit
def inverse(scale: Float32) -> Float32:
    """1 / scale for the largest scale of a head, 0 where all are 0."""
    return cute.arch.rcp_approx(scale) if scale > Float32(1e-37) else Float32(0.0)
