"""The operators ``fa3::quantize``, ``fa3::fp8_forward``, ``fa3::fp8_forward_lse`` and ``fa3::fp8_backward``.

The first quantizes one tensor. The others are attention of 16-bit q, k and v, computed in e4m3, and its gradients,
which are those of the 16-bit backward: rounding passes them through unchanged (the straight-through estimator).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa3 import backends, ops, quantization
from fa3.e4m3 import slots_of
from fa3.options import Fp8, Options
from fa3.quantization import QK_DTYPES, QuantizedQKV, rope_rows
from fa3.schemas import OPTIONS, flatten, unflatten

_library = torch.library.Library("fa3", "FRAGMENT")

# ``rows`` of an operator: this many rows share a scale, or all of a head, or all there are.
_NAMES = {0: "head", -1: "tensor"}
ROWS = {name: rows for rows, name in _NAMES.items()}

_library.define(
    "quantize(Tensor x, Tensor? cos, Tensor? sin, int rows, bool rotate, int seed, bool interleaved, "
    "int first_position, bool transpose, bool power_of_two, str out_dtype='e4m3') -> (Tensor, Tensor)"
)
# A seed that is None: not incoherent. What q_block, k_block, v_transposed, out_dtype and two_level of the options say
# is how to quantize and to compute; ``v_rows``, "block", "head" or "tensor", says which rows of v share a scale, and
# without blocks those of q and k too; ``qk_dtype`` is what q and k become.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, bool interleaved, int? seed, str v_rows, str qk_dtype"
)
_INPUT_COUNT, _DIFFERENTIABLE = 9, 3
_CALL = f"float? softmax_scale, bool causal, {OPTIONS}"
_library.define(f"fp8_forward({_INPUTS}, {_CALL}) -> Tensor")
_library.define(f"fp8_forward_lse({_INPUTS}, {_CALL}) -> (Tensor, Tensor)")
_library.define(
    f"fp8_backward(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def quantize_tensor(
    x: Tensor,
    *,
    rows: int | str,
    rotate: bool,
    seed: int,
    rope: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    first_position: int,
    transpose: bool,
    power_of_two: bool,
    out: str,
) -> tuple[Tensor, Tensor]:
    """`fa3.quantization.quantize_tensor` as an operator, by the backend of the device of x. It has no gradient."""
    cos, sin = (None, None) if rope is None else rope
    number = rows if isinstance(rows, int) else ROWS[rows]
    return torch.ops.fa3.quantize(
        x, cos, sin, number, rotate, seed, interleaved, first_position, transpose, power_of_two, out
    )


def fp8_options(x: QuantizedQKV, out_dtype: str, two_level: bool | None) -> Fp8:
    """What of q, k and v travels beside them."""
    return Fp8(
        x.q_scale, x.k_scale, x.v_scale, x.v_scale_max, x.q_block, x.k_block, x.v_layout == "transposed", out_dtype,
        two_level,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    seed: int | None,
    block: tuple[int, int] | str,
    v_of_head: bool,
    qk_dtype: str,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    options: Options,
) -> Any:
    """Call the operator for these arguments: out, or (out, lse) with ``return_lse``.

    ``options.fp8`` tells v_transposed, out_dtype and two_level; ``v_of_head`` is that of `quantization.quantize_qkv`.
    """
    cos, sin = (None, None) if rope is None else rope
    v_rows = "head" if v_of_head else block if isinstance(block, str) else "block"
    if isinstance(block, tuple) and options.fp8 is not None:
        options = options._replace(fp8=options.fp8._replace(q_block=block[0], k_block=block[1]))
    operator = torch.ops.fa3.fp8_forward_lse if return_lse else torch.ops.fa3.fp8_forward
    return operator(q, k, v, cos, sin, interleaved, seed, v_rows, qk_dtype, softmax_scale, causal, *flatten(options))


# Kernels, for every device ------------------------------------------------------------------------------------------


def _rope(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


def _quantize(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: int,
    rotate: bool,
    seed: int,
    interleaved: bool,
    first_position: int,
    transpose: bool,
    power_of_two: bool,
    out: str = "e4m3",
) -> tuple[Tensor, Tensor]:
    values, scale = backends.quantizer_for(x)(
        x,
        rows=_NAMES.get(rows, rows),
        rotate=rotate,
        seed=seed,
        rope=_rope(cos, sin),
        interleaved=interleaved,
        first_position=first_position,
        transpose=transpose,
        power_of_two=power_of_two,
        out=out,
    )
    # One scale in all may be one number expanded, of which an operator's answer may not be made.
    return values, scale.contiguous()


def _unflatten(arguments: tuple[Any, ...]) -> tuple[Options, Fp8]:
    """The options without what goes with e4m3, and that."""
    options = unflatten(arguments) or Options()
    return options._replace(fp8=None), options.fp8 or Fp8()


def _call_forward(
    return_lse: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    seed: int | None,
    v_rows: str,
    qk_dtype: str,
    softmax_scale: float | None,
    causal: bool,
    *arguments: Any,
) -> Any:
    options, fp8 = _unflatten(arguments)
    block: tuple[int, int] | str = (fp8.q_block, fp8.k_block) if fp8.q_block else v_rows
    v_layout = "transposed" if fp8.v_transposed else "row"
    quantize = backends.quantizer_for(q)
    x = quantization.quantize_qkv(
        quantize, q, k, v, _rope(cos, sin), interleaved, seed, block, v_layout, v_rows == "head", qk_dtype
    )
    options = options._replace(fp8=fp8_options(x, fp8.out_dtype, fp8.two_level))
    answer = backends.forward_for(q)(x.q, x.k, x.v, softmax_scale, causal, return_lse, options)
    return answer if return_lse else answer[0]


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor] | None, interleaved: bool, first: int, back: bool = False) -> Tensor:
    """Rotary embedding of 16-bit x, or the transposed one of its gradient, in its dtype."""
    if rope is None:
        return x
    return rope_rows(x, rope, interleaved, first, transposed=back).to(x.dtype)


def _fp8_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    seed: int | None,
    v_rows: str,
    qk_dtype: str,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    options, rope, first = _unflatten(arguments)[0], _rope(cos, sin), k.shape[1] - q.shape[1]
    # Signs and the Hadamard matrix together are orthogonal: scores, and so gradients, do not know of them.
    rotated = _rotate(q, rope, interleaved, first), _rotate(k, rope, interleaved, 0)
    dq, dk, *others = ops.call_backward(dout, dlse, *rotated, v, out, lse, softmax_scale, causal, *flatten(options))
    if dq is None or dk is None:
        raise AssertionError("a backward answers with the gradients of q and k")
    dq, dk = _rotate(dq, rope, interleaved, first, back=True), _rotate(dk, rope, interleaved, 0, back=True)
    return ops.present((dq, dk, *others), dout)


for _name, _kernel in (
    ("quantize", _quantize),
    ("fp8_forward", partial(_call_forward, False)),
    ("fp8_forward_lse", partial(_call_forward, True)),
    ("fp8_backward", _fp8_backward),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


# Fakes: shapes and dtypes without the numbers -----------------------------------------------------------------------


@torch.library.register_fake("fa3::quantize", lib=_library)
def _fake_quantize(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: int,
    rotate: bool,
    seed: int,
    interleaved: bool,
    first_position: int,
    transpose: bool,
    power_of_two: bool,
    out: str = "e4m3",
) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, head_dim = x.shape
    shape = (batch, heads, head_dim, slots_of(seqlen)) if transpose else x.shape
    blocks = (-(-seqlen // rows),) if rows > 0 else ()
    return x.new_empty(shape, dtype=QK_DTYPES[out]), x.new_empty((batch, heads, *blocks), dtype=torch.float32)


def _fake_checks(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, arguments: tuple[Any, ...]
) -> None:
    ops.check_fakes(q, k, v, softmax_scale, causal, flatten(_unflatten(arguments)[0]))


@torch.library.register_fake("fa3::fp8_forward", lib=_library)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    softmax_scale, causal, *options = rest[_INPUT_COUNT - _DIFFERENTIABLE :]
    _fake_checks(q, k, v, softmax_scale, causal, tuple(options))
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.register_fake("fa3::fp8_forward_lse", lib=_library)
def _fake_forward_lse(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = _fake_forward(q, k, v, *rest)
    return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.register_fake("fa3::fp8_backward", lib=_library)
def _fake_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    # Out and the LSE come before the scale.
    softmax_scale, causal, *options = rest[_INPUT_COUNT - _DIFFERENTIABLE + 2 :]
    _fake_checks(q, k, v, softmax_scale, causal, tuple(options))
    return *(x.new_empty(x.shape) for x in (q, k, v)), *ops.fake_sink_and_qv(q, tuple(options))


# Autograd -----------------------------------------------------------------------------------------------------------

_forward, _forward_lse, _backward = (
    getattr(torch.ops.fa3, _name).default for _name in ("fp8_forward", "fp8_forward_lse", "fp8_backward")
)
_pair = ops.Pair(_forward_lse, _backward, _INPUT_COUNT, _DIFFERENTIABLE)
for _name, _autograd in (
    ("fp8_forward", partial(ops.forward_with_graph, _forward, _pair, False)),
    ("fp8_forward_lse", partial(ops.forward_with_graph, _forward_lse, _pair, True)),
    ("fp8_backward", partial(ops.backward_with_graph, _backward)),
):
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)
