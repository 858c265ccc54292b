"""Plain numbers of e4m3, of its V^T and of int8, which kernels and their twins in PyTorch share."""

from __future__ import annotations

from typing import Any

#: Largest magnitude of e4m3.
E4M3_MAX = 448.0
#: Largest magnitude that q and k have in int8; -128 has no counterpart.
INT8_MAX = 127.0
#: By the names of what q and k become.
LARGEST = {"e4m3": E4M3_MAX, "int8": INT8_MAX}

#: A float32 to which numbers up to 2^22 are added in steps of 1: its last bits are then those of their integer. The
#: sum is rounded to nearest even, as int8 shall be.
INTEGER_STEPS = 1.5 * 2.0**23

#: What a smaller amax counts as, 0 too: the products of scales with each other and with softmax_scale stay normal
#: float32 numbers, and a block of zeros never has the largest scale of its head, to which others are compared.
SMALLEST_AMAX = 2.0**-40
#: What a larger one is rounded to: the largest float32 number that is a power of two times 448.
LARGEST_AMAX = E4M3_MAX * 2.0**119

#: Keys of V^T are stored in groups of so many, in an order of their own.
SLOTS = 16


def round_up_bits(bits: Any) -> Any:
    """The bits of the smallest power of two times 448 that is at least a float32 number; by ``bits`` of that number.

    448 is 1.75 * 2^8: a fraction above 1.75 goes to the next exponent, every other up to 1.75. A number, or a tensor.
    """
    return ((bits + 0x1FFFFF) & 0x7F800000) | 0x600000


def slots_of(keys: Any) -> Any:
    """Slots of so many keys in V^T: the keys rounded up to whole groups."""
    return (keys + SLOTS - 1) // SLOTS * SLOTS


def key_of_slot(word: Any, index: Any) -> Any:
    """The key in slot ``4 * word + index`` of V^T, index 0 to 3.

    Thread t of a quad has keys 2t, 2t + 1, 8 + 2t and 9 + 2t of 16 in a row of a warpgroup's accumulator of scores; as
    an A operand of e4m3 it has four neighbours, which are slots 4t to 4t + 3.
    """
    return SLOTS * (word // 4) + 2 * (word % 4) + index % 2 + 8 * (index // 2)


#: Which key of its group a slot of V^T holds.
KEY_OF_SLOT = tuple(key_of_slot(slot // 4, slot % 4) for slot in range(SLOTS))
