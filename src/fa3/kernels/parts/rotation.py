"""What a thread does to its part of a row before it is rounded: rotary embedding, random signs, Hadamard transform.

A row is cut in pieces of 16 columns, or of 8, and ``across`` threads next to each other share it: thread j has pieces
j, j + across, j + 2 across, ... (`fa3.spec.QuantizeSpec`). So neighbours move what is next to each other, a thread has
both columns of a pair (i, i + head_dim / 2), and of the eight stages of the transform of 256 columns only two need an
exchange.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.e4m3 import E4M3_MAX, key_of_slot

#: The two sign bits of a pair of 16-bit floats, and the one of a float32.
_SIGNS_OF_PAIR = 0x80008000 - 2**32
_SIGN = -(2**31)
#: The upper half of a word.
_SECOND = -(2**16)
#: The bits of the largest finite float32; those of infinity are the next number.
_LARGEST_FINITE = 0x7F7FFFFF
#: The bits of 1.0.
_ONE = 0x3F800000


@cute.jit
def signs_of_piece(
    words: tuple, index: cutlass.Constexpr, thread: Int32, across: cutlass.Constexpr, columns: cutlass.Constexpr
) -> Int32:
    """The signs of one piece: bit i of the result is that of column i, but where i is odd it is bit i + 15.

    Args:
        words: 8 words, bit ``i % 32`` of word ``i // 32`` is 1 where column i of the row changes its sign.
        index: which piece of the thread.
        thread: which of the threads that share the row.
        across: how many these are.
        columns: of a piece, 8 or 16.
    """
    in_word = 32 // columns
    place = index * across + thread
    first, last = index * across // in_word, (index * across + across - 1) // in_word
    word = Int32(words[first])
    for i in cutlass.range_constexpr(first + 1, last + 1):
        word = Int32(words[i]) if place >= in_word * i else word
    bits = word >> (columns * (place % in_word))
    every = 2**columns - 1
    return (bits & (0x5555 & every)) | ((bits & (0xAAAA & every)) << 15)


def second_of_pairs(signs: Int32) -> Int32:
    """Signs of a piece for `flip_pair` that leave columns 2i, and change 2i + 1 where those of the two differ."""
    return (signs ^ (signs << 16)) & _SECOND


def mask_of_pair(signs: Int32, index: int) -> Int32:
    """What changes the signs of columns 2 * index and 2 * index + 1 of a piece, two 16-bit floats in a word, by xor."""
    return (signs << (15 - 2 * index)) & _SIGNS_OF_PAIR


@cute.jit
def flip(value: Float32, signs: Int32, column: cutlass.Constexpr) -> Float32:
    """One column of a piece with its sign."""
    shift = 31 - column - 15 * (column % 2)
    return (value.bitcast(Int32) ^ ((signs << shift) & _SIGN)).bitcast(Float32)


@cute.jit
def rotate_pairs(
    values: cute.Tensor,
    first: cutlass.Constexpr,
    distance: cutlass.Constexpr,
    step: cutlass.Constexpr,
    cos: cute.Tensor,
    sin: cute.Tensor,
):
    """Rotary embedding of pairs of values: number i is (first + step * i, that + distance)."""
    for i in cutlass.range_constexpr(cute.size(cos)):
        place = first + step * i
        lower, upper = values[place], values[place + distance]
        values[place] = lower * cos[i] - upper * sin[i]
        values[place + distance] = upper * cos[i] + lower * sin[i]


@cute.jit
def butterflies(values: cute.Tensor, stride: cutlass.Constexpr):
    """One stage of the transform inside a thread: sums and differences of values that are ``stride`` apart."""
    for i in cutlass.range_constexpr(cute.size(values)):
        if cutlass.const_expr(i & stride == 0):
            lower, upper = values[i], values[i + stride]
            values[i] = lower + upper
            values[i + stride] = lower - upper


@cute.jit
def sign_of(thread: Int32, offset: cutlass.Constexpr) -> Float32:
    """1 in the lower, -1 in the upper of two threads whose numbers differ in the bit ``offset``."""
    # By bits: of a choice between 1 and -1 the compiler makes a choice for each value, not a factor.
    return (((thread << (32 - offset.bit_length())) & _SIGN) | _ONE).bitcast(Float32)


@cute.jit
def sum_or_difference(mine: Float32, theirs: Float32, sign: Float32) -> Float32:
    """One value of a stage between two threads."""
    return theirs + sign * mine


@cute.jit
def butterflies_between(values: cute.Tensor, thread: Int32, offset: cutlass.Constexpr):
    """One stage of the transform between threads whose numbers differ in the bit ``offset``."""
    sign = sign_of(thread, offset)
    for i in cutlass.range(cute.size(values), unroll_full=True):
        theirs = cute.arch.shuffle_sync_bfly(values[i], offset=offset)
        values[i] = sum_or_difference(values[i], theirs, sign)


def stages_of(held: int, piece: int, exchanging: int) -> tuple[tuple[str, int], ...]:
    """The stages of the transform of ``held`` values together with those of ``exchanging`` threads, beyond pieces.

    Each is ``"between"`` threads or ``"inside"`` them, and its offset or stride. In the order of
    `fa3.quantization.hadamard`, since sums of float32 depend on it: inside a piece, between threads, between pieces.
    """
    return (
        *(("between", 1 << bit) for bit in range((exchanging - 1).bit_length())),
        *(("inside", piece << bit) for bit in range((held // piece - 1).bit_length())),
    )


@cute.jit
def hadamard(values: cute.Tensor, thread: Int32, stages: cutlass.Constexpr):
    """The stages of the transform."""
    for i in cutlass.range_constexpr(len(stages)):
        if cutlass.const_expr(stages[i][0] == "inside"):
            butterflies(values, stages[i][1])
        else:
            butterflies_between(values, thread, stages[i][1])


@cute.jit
def largest(values: cute.Tensor, nan: cutlass.Constexpr = False) -> Float32:
    """The largest magnitude, NaN left out, or with ``nan`` NaN where there is any."""
    # Chains that do not wait for each other.
    chains = 4
    parts = [Float32(0.0)] * chains
    for i in cutlass.range_constexpr(cute.size(values)):
        parts[i % chains] = cute.arch.fmax(parts[i % chains], abs(values[i]), nan=nan)
    low, high = cute.arch.fmax(parts[0], parts[1], nan=nan), cute.arch.fmax(parts[2], parts[3], nan=nan)
    return cute.arch.fmax(low, high, nan=nan)


@cute.jit
def largest_finite(values: cute.Tensor) -> Float32:
    """The largest finite magnitude. Infinities become NaN."""
    found = largest(values)
    # Once if that is an infinity, else not at all. A loop, of which the compiler knows no bound: a branch it would turn
    # into predicated instructions, which every warp issues for nothing, a seventh of the kernel.
    for _ in cutlass.range(found.bitcast(Int32) - _LARGEST_FINITE, unroll=1):
        # Not `largest` of what is left: the compiler would see that it is the same without a loop, and work it out
        # always, and twice.
        found = Float32(0.0)
        for i in cutlass.range(cute.size(values), unroll_full=True):
            if abs(values[i]) == Float32.inf:
                values[i] = Float32(float("nan"))
            else:
                found = cute.arch.fmax(found, abs(values[i]))
    return found


@cute.jit
def largest_or_nan(values: cute.Tensor) -> Float32:
    """The largest magnitude if all are finite, else NaN, whose bits as an integer are above all others."""
    found = largest(values, nan=True)
    return found if found != Float32.inf else Float32(float("nan"))


@cute.jit
def inverse_of(amax: Float32, reciprocal: cutlass.Constexpr, numerator: cutlass.Constexpr = E4M3_MAX) -> Float32:
    """448, or another such number, over amax, correctly rounded, for a finite amax of 2^-64 or more.

    As the compiler's own division, without its branch for numbers that do not occur here: that is a function of its
    own, for whose registers the values would have to make room.

    Args:
        reciprocal: a function that gives 1 / x to 22 bits.
        numerator: a Python float.
    """
    # Away from the largest numbers, whose reciprocals have fewer bits.
    factor = Float32(2.0**-64) if amax > 2.0**60 else Float32(1.0)
    divisor = amax * factor
    estimate = reciprocal(divisor)
    estimate = cute.math.fma(estimate, cute.math.fma(-divisor, estimate, Float32(1.0)), estimate)
    quotient = estimate * numerator
    for _ in cutlass.range_constexpr(2):
        remainder = cute.math.fma(-divisor, quotient, Float32(numerator))
        quotient = cute.math.fma(remainder, estimate, quotient)
    return quotient * factor


@cute.jit
def key_of_slots(word: Int32, index: cutlass.Constexpr) -> Int32:
    """The key in slot ``4 * word + index`` of V^T."""
    return key_of_slot(word, index)
