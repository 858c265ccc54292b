"""Rounding to e4m3 in integers, for kernel bricks on the CPU, which has no such conversion."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def pack_four(first: Float32, second: Float32, third: Float32, fourth: Float32) -> Int32:
    """`fa3.kernels.parts.ptx.pack_four` in integers: the host has no such conversion."""
    word = Int32(0)
    for i, value in enumerate((first, second, third, fourth)):
        word = word | (_e4m3(value) << (8 * i))
    return word


@cute.jit
def _e4m3(value: Float32) -> Int32:
    """Round to e4m3, to nearest even, saturating; NaN is 0x7f."""
    bits = value.bitcast(Int32)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Normal numbers: half of the last place that stays, ties to even, and the exponent's bias 127 becomes 7.
    rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Multiples of 2^-9 below 2^-6: adding 2^14 to a float32 rounds it to such, in its last bits.
    small = (magnitude.bitcast(Float32) + Float32(16384.0)).bitcast(Int32) - (141 << 23)
    result = rounded if magnitude >= 121 << 23 else small
    # 448 is 0x7e; what rounds to more stays there.
    result = cutlass.min(result, Int32(0x7E))
    return (Int32(0x7F) if magnitude > 0x7F800000 else result) | sign
