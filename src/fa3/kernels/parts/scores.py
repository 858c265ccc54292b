"""What may be done to scores between the product and the softmax: a cap, and functions of the caller's own."""

import importlib
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from .layout import ROWS_PER_THREAD, column_in_tile

#: Letter of a spec's ``score_aux`` and ``mask_aux`` -> element type.
AUX_DTYPES = {"f": Float32, "i": Int32}


def find_mod(name: str) -> Callable[..., Any] | None:
    """The function that ``"module:function"`` names, or ``None`` for an empty name."""
    if not name:
        return None
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def make_aux(codes: str, numbers: tuple) -> tuple[cute.Tensor, ...]:
    """Row-major tensors in global memory from their codes and numbers."""
    tensors = []
    for code in codes.split(","):
        if code:
            dims = int(code[1:])
            pointer = cute.make_ptr(AUX_DTYPES[code[0]], Int64(numbers[0]), cute.AddressSpace.gmem, assumed_align=4)
            shape = tuple(numbers[1 : 1 + dims])
            order = tuple(reversed(range(dims)))
            tensors.append(cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=order)))
            numbers = numbers[1 + dims :]
    return tuple(tensors)


@cute.jit
def tanh(x: Float32) -> Float32:
    """Hyperbolic tangent to about 1e-7: the chip's own instruction is 5000 times coarser, too coarse for logits."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * Float32(2.8853900817779268), fastmath=True))


@cute.jit
def cap(scores: cute.Tensor, factor: Float32):
    """Replace each score by ``tanh(factor * score)``."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = tanh(scores[i] * factor)


@cute.jit
def modify(
    score_mod: cutlass.Constexpr,
    scores: cute.Tensor,
    factor: Float32,
    batch: Int32,
    heads: tuple[Int32, Int32],
    queries: tuple[Int32, Int32],
    first_key: Int32,
    aux: tuple,
):
    """Replace each score s by ``score_mod(factor * s, ...)``; arguments as `fa3.kernels.parts.mask.Mask.hide`."""
    # Both rows of a column in turn: what a modification reads by its key is then used at once, and not kept.
    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        key = first_key + Int32(column_in_tile(c))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            scores[r, c] = Float32(score_mod(scores[r, c] * factor, batch, heads[r], queries[r], key, aux))


@cute.jit
def hide(
    mask_mod: cutlass.Constexpr,
    scores: cute.Tensor,
    batch: Int32,
    heads: tuple[Int32, Int32],
    queries: tuple[Int32, Int32],
    first_key: Int32,
    aux: tuple,
):
    """Set scores to -inf where ``mask_mod`` says no."""
    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        key = first_key + Int32(column_in_tile(c))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            seen = Boolean(mask_mod(batch, heads[r], queries[r], key, aux))
            scores[r, c] = scores[r, c] if seen else -Float32.inf
