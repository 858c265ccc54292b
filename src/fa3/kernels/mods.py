"""CuTe DSL twins of the modifications in fa3/mods.py, which says what each of them computes.

Each is called for one score of a tile. Tiles may end behind the last query and the last key, so an index that one of
them reads a tensor by is clamped into it; what comes of it there is not used. A derivative turns the gradient of the
score that a modification returned into that of the score that it was given.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


@cute.jit
def alibi(score: Float32, batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Float32:
    """aux: slopes (heads,) float32."""
    distance = q_index - kv_index
    return score - aux[0][head] * Float32(cutlass.max(distance, -distance))


@cute.jit
def relative_bias(score: Float32, batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Float32:
    """aux: bias (heads, 2 * max_distance + 1) float32."""
    farthest = aux[0].shape[1] // 2
    offset = cutlass.max(cutlass.min(kv_index - q_index, farthest), -farthest)
    return score + aux[0][head, offset + farthest]


@cute.jit
def additive(
    grad: Float32, score: Float32, batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple
) -> Float32:
    """The derivative of every modification that adds to the score what does not depend on it."""
    return grad


@cute.jit
def prefix_lm(batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Boolean:
    """aux: prefix_lengths (batch,) int32."""
    return kv_index < cutlass.max(aux[0][batch], q_index + 1)


@cute.jit
def document(batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Boolean:
    """aux: document_ids (batch, seqlen) int32."""
    last = aux[0].shape[1] - 1
    return aux[0][batch, cutlass.min(q_index, last)] == aux[0][batch, cutlass.min(kv_index, last)]


@cute.jit
def document_causal(batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Boolean:
    """aux: document_ids (batch, seqlen) int32."""
    return document(batch, head, q_index, kv_index, aux) & (kv_index <= q_index)
