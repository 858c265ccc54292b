"""The operators ``fa3::forward``, ``fa3::forward_lse`` and ``fa3::backward``, for torch.compile and autograd.

Each has one kernel for every device (it asks `fa3.backends` who computes), a fake for tracing, and an autograd
kernel. Each comes a second time for q, k and v that are packed into one tensor, whose gradient is then one tensor too.

Each has an overload ``options`` for the calls that are not plain: defaults would do as well, but the dispatcher would
take its time over them in every plain call. The same functions stand behind both.

They are defined by ``torch.library.Library`` because the ``custom_op`` decorator costs 13 microseconds more a call,
as much as two launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fa3 import backends
from fa3.backends import tiled
from fa3.options import Options, fp8_of, is_fp8, out_dtype_of
from fa3.problem import check_forward, check_kinds
from fa3.schemas import AUX, OPTIONS, QV, SINK, flatten, unflatten, unpack

_library = torch.library.Library("fa3", "DEF")
for _packing, _inputs, _gradients in (
    ("", "Tensor q, Tensor k, Tensor v", "Tensor, Tensor, Tensor"),
    ("_packed", "Tensor qkv, int? num_heads_q", "Tensor"),
):
    _forward_arguments = f"{_inputs}, float? softmax_scale, bool causal"
    _backward_arguments = (
        f"Tensor dout, Tensor? dlse, {_inputs}, Tensor out, Tensor lse, float? softmax_scale, bool causal"
    )
    _library.define(f"forward{_packing}({_forward_arguments}) -> Tensor")
    _library.define(f"forward{_packing}.options({_forward_arguments}, {OPTIONS}) -> Tensor")
    _library.define(f"forward_lse{_packing}({_forward_arguments}) -> (Tensor, Tensor)")
    _library.define(f"forward_lse{_packing}.options({_forward_arguments}, {OPTIONS}) -> (Tensor, Tensor)")
    _library.define(f"backward{_packing}({_backward_arguments}) -> ({_gradients})")
    _library.define(f"backward{_packing}.options({_backward_arguments}, {OPTIONS}) -> ({_gradients}, Tensor, Tensor)")

#: (q, k, v, softmax_scale, causal) -> out; shapes and errors as `fa3.flash_attn_func`.
forward = torch.ops.fa3.forward.default
#: (q, k, v, softmax_scale, causal, options as `flatten` writes them) -> out.
forward_options = torch.ops.fa3.forward.options
#: (q, k, v, softmax_scale, causal) -> (out, lse).
forward_lse = torch.ops.fa3.forward_lse.default
#: (q, k, v, softmax_scale, causal, options) -> (out, lse).
forward_lse_options = torch.ops.fa3.forward_lse.options
#: (dout, dlse or None, q, k, v, out, lse, softmax_scale, causal) -> (dq, dk, dv); see `fa3.backends.tiled.backward`.
backward = torch.ops.fa3.backward.default
#: The same and the options -> (dq, dk, dv, dsink, dqv), the last two of shape (0,) where the call had no such input.
backward_options = torch.ops.fa3.backward.options

# Of packed tensors, with qkv and num_heads_q in place of q, k and v, as `unpack` takes them, and dqkv in place of dq,
# dk and dv.
forward_packed = torch.ops.fa3.forward_packed.default
forward_packed_options = torch.ops.fa3.forward_packed.options
forward_lse_packed = torch.ops.fa3.forward_lse_packed.default
forward_lse_packed_options = torch.ops.fa3.forward_lse_packed.options
backward_packed = torch.ops.fa3.backward_packed.default
backward_packed_options = torch.ops.fa3.backward_packed.options


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    options: Options | None,
) -> Any:
    """Call the operator for these arguments: out, or (out, lse) with ``return_lse``."""
    if options is None:
        operator = forward_lse if return_lse else forward
        return operator(q, k, v, softmax_scale, causal)
    operator = forward_lse_options if return_lse else forward_options
    return operator(q, k, v, softmax_scale, causal, *flatten(options))


def attend_packed(
    qkv: Tensor,
    num_heads_q: int | None,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    options: Options | None,
) -> Any:
    """The same of packed tensors, which `unpack` can take apart."""
    if options is None:
        operator = forward_lse_packed if return_lse else forward_packed
        return operator(qkv, num_heads_q, softmax_scale, causal)
    operator = forward_lse_packed_options if return_lse else forward_packed_options
    return operator(qkv, num_heads_q, softmax_scale, causal, *flatten(options))


# Kernels, for every device ----------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any) -> Tensor:
    return _call_backend(q, k, v, softmax_scale, causal, False, options)[0]


def _forward_lse(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any
) -> tuple[Tensor, Tensor | None]:
    return _call_backend(q, k, v, softmax_scale, causal, True, options)


def _call_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:
    compute = backends.forward_for(q)
    if options:
        return compute(q, k, v, softmax_scale, causal, return_lse, unflatten(options))
    return compute(q, k, v, softmax_scale, causal, return_lse)


def call_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
    *arguments: Any,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    _refuse_gradients_of_e4m3(q)
    options = unflatten(arguments)
    # Whoever walks the graph may want determinism, not only who made it.
    if torch.are_deterministic_algorithms_enabled():
        options = (options or Options())._replace(deterministic=True)
    compute = backends.backward_for(q, k, v, softmax_scale, causal, options)
    return compute(dout, dlse, q, k, v, out, lse, softmax_scale, causal, options, into)


def present(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """An operator may return no ``None``: an empty tensor stands for it."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    return call_backward(*arguments)[:3]


def _backward_options(dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return present(call_backward(dout, *rest), dout)


def _forward_packed(qkv: Tensor, num_heads_q: int | None, *rest: Any) -> Tensor:
    return _forward(*unpack(qkv, num_heads_q), *rest)


def _forward_lse_packed(qkv: Tensor, num_heads_q: int | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    return _forward_lse(*unpack(qkv, num_heads_q), *rest)


def _call_backward_packed(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, num_heads_q: int | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    dqkv = qkv.new_empty(qkv.shape)
    # Nothing is put together afterwards: the backend writes each gradient where it belongs.
    into = unpack(dqkv, num_heads_q)
    _, _, _, *others = call_backward(dout, dlse, *unpack(qkv, num_heads_q), *rest, into=into)
    return dqkv, *others


def _backward_packed(*arguments: Any) -> Tensor | None:
    return _call_backward_packed(*arguments)[0]


def _backward_packed_options(dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return present(_call_backward_packed(dout, *rest), dout)


for _name, _kernel in (
    ("forward", _forward),
    ("forward.options", _forward),
    ("forward_lse", _forward_lse),
    ("forward_lse.options", _forward_lse),
    ("backward", _backward),
    ("backward.options", _backward_options),
    ("forward_packed", _forward_packed),
    ("forward_packed.options", _forward_packed),
    ("forward_lse_packed", _forward_lse_packed),
    ("forward_lse_packed.options", _forward_lse_packed),
    ("backward_packed", _backward_packed),
    ("backward_packed.options", _backward_packed_options),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


# Fakes: shapes and dtypes without the numbers -----------------------------------------------------------------------


def check_fakes(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, arguments: tuple[Any, ...]
) -> None:
    """Errors as the kernels raise them. Sizes that are symbols wait for the kernel: a check here would guard them."""
    options = unflatten(arguments)
    check_kinds(q, k, v, options)
    tensors = (q, k, v, *(x for x in arguments if isinstance(x, Tensor)))
    numbers = (softmax_scale, *arguments, *(number for x in tensors for number in (*x.shape, *x.stride())))
    if not any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        check_forward(q, k, v, softmax_scale, causal, options=options)


def _fake_out(q: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    options = unflatten(arguments)
    fp8 = fp8_of(q.dtype, options)
    head_dim_v = v.shape[3 if fp8 is None or not fp8.v_transposed else 2]
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], head_dim_v, dtype=out_dtype_of(q.dtype, options))


@torch.library.register_fake("fa3::forward", lib=_library)
@torch.library.register_fake("fa3::forward.options", lib=_library)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any) -> Tensor:
    check_fakes(q, k, v, softmax_scale, causal, options)
    return _fake_out(q, v, options)


@torch.library.register_fake("fa3::forward_lse", lib=_library)
@torch.library.register_fake("fa3::forward_lse.options", lib=_library)
def _fake_forward_lse(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    check_fakes(q, k, v, softmax_scale, causal, options)
    out = _fake_out(q, v, options)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=tiled.accumulator_dtype(q.dtype))
    return out, lse


@torch.library.register_fake("fa3::backward", lib=_library)
def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    _refuse_gradients_of_e4m3(q)
    check_fakes(q, k, v, softmax_scale, causal, options)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def fake_sink_and_qv(q: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    sink, qv, *_ = *options[SINK : QV + 1], None, None
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (sink, qv))


@torch.library.register_fake("fa3::backward.options", lib=_library)
def _fake_backward_options(dout: Tensor, dlse: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_backward(dout, dlse, q, *rest), *fake_sink_and_qv(q, rest[6:])


@torch.library.register_fake("fa3::forward_packed", lib=_library)
@torch.library.register_fake("fa3::forward_packed.options", lib=_library)
def _fake_forward_packed(qkv: Tensor, num_heads_q: int | None, *rest: Any) -> Tensor:
    return _fake_forward(*unpack(qkv, num_heads_q), *rest)


@torch.library.register_fake("fa3::forward_lse_packed", lib=_library)
@torch.library.register_fake("fa3::forward_lse_packed.options", lib=_library)
def _fake_forward_lse_packed(qkv: Tensor, num_heads_q: int | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward_lse(*unpack(qkv, num_heads_q), *rest)


@torch.library.register_fake("fa3::backward_packed", lib=_library)
def _fake_backward_packed(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, num_heads_q: int | None, *rest: Any
) -> Tensor:
    _fake_backward(dout, dlse, *unpack(qkv, num_heads_q), *rest)
    return qkv.new_empty(qkv.shape)


@torch.library.register_fake("fa3::backward_packed.options", lib=_library)
def _fake_backward_packed_options(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, num_heads_q: int | None, *rest: Any
) -> tuple[Tensor, ...]:
    dqkv = _fake_backward_packed(dout, dlse, qkv, num_heads_q, *rest)
    return dqkv, *fake_sink_and_qv(qkv, rest[4:])


# Autograd -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A forward operator that returns the LSE, and the operator of its gradients.

    Attributes:
        inputs: arguments before the softmax scale.
        differentiable: how many of them, from the first on, have gradients; sink and qv follow those.
    """

    forward: Any
    backward: Any
    inputs: int
    differentiable: int


def _refuse_gradients_of_e4m3(q: Tensor) -> None:
    if is_fp8(q.dtype):
        raise NotImplementedError(
            "there are no gradients of a call in e4m3 or int8, by any of its inputs: detach them or use "
            "torch.no_grad(); flash_attn_fp8_func takes 16-bit q, k and v, quantizes them itself, and has gradients"
        )


def _refuse_gradients_of_modifications(options: tuple[Any, ...]) -> None:
    for place, name in AUX.items():
        if place < len(options) and isinstance(options[place], Tensor) and options[place].requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient, and flash_attn_func has none for what modifications read: "
                "detach it, or call it under torch.no_grad()"
            )


def _apply(function: Any, *arguments: Any) -> Any:
    """``function.apply``, also inside torch.func: its transforms call an autograd kernel once a level."""
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _below_autograd(operator: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
    """Call an operator below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _redispatch(operator: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
    """Call an operator below autograd, from inside the forward of an autograd function.

    Such a forward runs without grad mode, but what lies below may be an outer level of torch.func, or the plain
    autograd below all its levels, which has a graph of its own to make.
    """
    with torch.enable_grad():
        return _below_autograd(operator, keyset, *arguments)


#: Stands for a tensor, which autograd keeps.
_KEPT = object()


class _Function(_SingleLevelFunction):
    """An autograd function that compiled autograd can trace too: it asks for a key that only the public base has."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        return (ctx._autograd_function_id,)


class _Attention(_Function):
    """Calls an operator below autograd, and answers with its gradients when some come back."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, pair: Pair, return_lse: bool, *arguments: Any) -> Any:
        out, lse = _redispatch(pair.forward, keyset, *arguments)
        ctx.save_for_backward(out, lse, *(x for x in arguments if isinstance(x, Tensor)))
        ctx.pair = pair
        ctx.arguments = [_KEPT if isinstance(x, Tensor) else x for x in arguments]
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        # Three arguments come before those of the operator.
        answer: list[Tensor | None] = [None] * (3 + len(ctx.arguments))
        if dout is None and dlse is None:
            return tuple(answer)
        out, lse, *kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = iter(kept)
        arguments = [next(tensors) if x is _KEPT else x for x in ctx.arguments]
        inputs, rest = arguments[: ctx.pair.inputs], arguments[ctx.pair.inputs :]
        gradients = ctx.pair.backward(dout, dlse, *inputs, out, lse, *rest)
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        # The options follow the scale and the causal flag.
        first = len(inputs) + 2
        places = [*range(ctx.pair.differentiable), first + SINK, first + QV]
        for place, gradient in zip(places, gradients, strict=False):
            if place < len(arguments) and ctx.needs_input_grad[3 + place]:
                answer[3 + place] = gradient
        return tuple(answer)


class _Gradients(_Function):
    """What `backward` answers under ``create_graph``: gradients whose own gradient is refused, never dropped.

    torch.func.grad always asks for such a graph, so the refusal waits until somebody differentiates twice.
    """

    @staticmethod
    def forward(ctx: Any, operator: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        return _redispatch(operator, keyset, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise NotImplementedError(
            "flash_attn_func has no second derivative: a gradient that passed through it (create_graph=True, or "
            "nested torch.func transforms) was differentiated again"
        )


def _refuse_forward_mode(*inputs: Any) -> None:
    """Forward-mode derivatives do not exist here; a dual tensor must not lose its tangent silently."""
    if forward_ad._current_level < 0:
        return
    for tensor in inputs:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("flash_attn_func has no forward-mode derivative: an input is a dual tensor")


def forward_with_graph(
    operator: Any, pair: Pair, return_lse: bool, keyset: torch._C.DispatchKeySet, *arguments: Any
) -> Any:
    """What a forward operator answers, with a graph where an input requires a gradient."""
    _refuse_forward_mode(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        # Packed or not, the first is of the dtype of all.
        _refuse_gradients_of_e4m3(arguments[0])
        _refuse_gradients_of_modifications(arguments[pair.inputs + 2 :])
        return _apply(_Attention, keyset, pair, return_lse, *arguments)
    return _below_autograd(operator, keyset, *arguments)


def backward_with_graph(operator: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
    """What a backward operator answers, with a graph where an input requires a gradient."""
    _refuse_forward_mode(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return _apply(_Gradients, operator, keyset, *arguments)
    return _below_autograd(operator, keyset, *arguments)


for _packing, _counts in (("", (3, 3)), ("_packed", (2, 1))):
    for _overload in ("default", "options"):
        _suffix = "" if _overload == "default" else f".{_overload}"
        _out, _with_lse, _of_both = (
            getattr(getattr(torch.ops.fa3, f"{_name}{_packing}"), _overload)
            for _name in ("forward", "forward_lse", "backward")
        )
        _pair = Pair(_with_lse, _of_both, *_counts)
        for _name, _autograd in (
            ("forward", partial(forward_with_graph, _out, _pair, False)),
            ("forward_lse", partial(forward_with_graph, _with_lse, _pair, True)),
            ("backward", partial(backward_with_graph, _of_both)),
        ):
            _library.impl(f"{_name}{_packing}{_suffix}", _autograd, "Autograd", with_keyset=True)
