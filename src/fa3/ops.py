"""The operators ``fa3::forward``, ``fa3::forward_lse`` and ``fa3::backward``, for torch.compile and autograd.

Each has one kernel for every device (it asks `fa3.backends` who computes), a fake for tracing, and an autograd
kernel. Gradients exist where the tiled backend computes; elsewhere asking for one raises, nothing is detached.

They are defined by ``torch.library.Library`` because the ``custom_op`` decorator costs 13 microseconds more a call,
as much as two launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fa3 import backends
from fa3.backends import sdpa, tiled
from fa3.problem import check_forward, check_kinds

_library = torch.library.Library("fa3", "DEF")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal"
_library.define(f"forward({_ARGUMENTS}) -> Tensor")
_library.define(f"forward_lse({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float? softmax_scale, bool causal) -> (Tensor, Tensor, Tensor)"
)

#: (q, k, v, softmax_scale, causal) -> out; shapes and errors as `fa3.flash_attn_func`.
forward = torch.ops.fa3.forward.default
#: (q, k, v, softmax_scale, causal) -> (out, lse).
forward_lse = torch.ops.fa3.forward_lse.default
#: (dout, dlse or None, q, k, v, out, lse, softmax_scale, causal) -> (dq, dk, dv); see `fa3.backends.tiled.backward`.
backward = torch.ops.fa3.backward.default


# Kernels, for every device ----------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> Tensor:
    return backends.forward_for(q)(q, k, v, softmax_scale, causal, False)[0]


def _forward_lse(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    return backends.forward_for(q)(q, k, v, softmax_scale, causal, True)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("forward_lse", _forward_lse, "CompositeExplicitAutograd")
# Only tiled makes graphs that come back here, so only tiled answers.
_library.impl("backward", tiled.backward, "CompositeExplicitAutograd")


# Fakes: shapes and dtypes without the numbers -----------------------------------------------------------------------


def _check_fakes(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> None:
    """Errors as the kernels raise them. Sizes that are symbols wait for the kernel: a check here would guard them."""
    check_kinds(q, k, v)
    numbers = (*q.shape, *k.shape, *v.shape, *q.stride(), *k.stride(), *v.stride(), softmax_scale)
    if not any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        check_forward(q, k, v, softmax_scale, causal)


@torch.library.register_fake("fa3::forward", lib=_library)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> Tensor:
    _check_fakes(q, k, v, softmax_scale, causal)
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


@torch.library.register_fake("fa3::forward_lse", lib=_library)
def _fake_forward_lse(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    _check_fakes(q, k, v, softmax_scale, causal)
    out = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
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
) -> tuple[Tensor, Tensor, Tensor]:
    _check_fakes(q, k, v, softmax_scale, causal)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# Autograd -----------------------------------------------------------------------------------------------------------


def _require_gradient(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> None:
    """Raise ``NotImplementedError`` where the backend of this call has no backward."""
    name = backends.for_device(q.device)
    if name == "sdpa" and backends.forced() is None:
        # FlashAttention-2 leaves some problems to tiled, and those do have gradients.
        name = "tiled" if sdpa.why_not(check_forward(q, k, v, softmax_scale, causal)) is not None else name
    if name != "tiled":
        raise NotImplementedError(
            f"flash_attn_func has no gradient on the {name} backend yet, and an input requires one: call it under "
            "torch.no_grad() or torch.inference_mode(), or set FA3_BACKEND=tiled, which is slower and differentiable"
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


class _Attention(_SingleLevelFunction):
    """Calls the operators below autograd, and answers with `backward` when gradients come back."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        return_lse: bool,
    ) -> Any:
        out, lse = _redispatch(forward_lse, keyset, q, k, v, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale = softmax_scale
        ctx.causal = causal
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = backward(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal)
        needs = ctx.needs_input_grad[1:4]
        gradients = (gradient if need else None for gradient, need in zip((dq, dk, dv), needs, strict=True))
        return (None, *gradients, None, None, None)


class _Gradients(_SingleLevelFunction):
    """What `backward` answers under ``create_graph``: gradients whose own gradient is refused, never dropped.

    torch.func.grad always asks for such a graph, so the refusal waits until somebody differentiates twice.
    """

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        return _redispatch(backward, keyset, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise NotImplementedError(
            "flash_attn_func has no second derivative: a gradient that passed through it (create_graph=True, or "
            "nested torch.func transforms) was differentiated again"
        )


def _refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Forward-mode derivatives do not exist here; a dual tensor must not lose its tangent silently."""
    if forward_ad._current_level < 0:
        return
    for tensor in inputs:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("flash_attn_func has no forward-mode derivative: an input is a dual tensor")


def _autograd_forward(
    keyset: torch._C.DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> Any:
    return _attend(forward, False, keyset, q, k, v, softmax_scale, causal)


def _autograd_forward_lse(
    keyset: torch._C.DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> Any:
    return _attend(forward_lse, True, keyset, q, k, v, softmax_scale, causal)


def _attend(
    operator: Any,
    return_lse: bool,
    keyset: torch._C.DispatchKeySet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> Any:
    """What the operator answers, with a graph where an input requires a gradient."""
    _refuse_forward_mode(q, k, v)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        _require_gradient(q, k, v, softmax_scale, causal)
        return _apply(_Attention, keyset, q, k, v, softmax_scale, causal, return_lse)
    return _below_autograd(operator, keyset, q, k, v, softmax_scale, causal)


def _autograd_backward(
    keyset: torch._C.DispatchKeySet,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> Any:
    inputs = (dout, dlse, q, k, v, out, lse)
    _refuse_forward_mode(*inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _apply(_Gradients, keyset, *inputs, softmax_scale, causal)
    return _below_autograd(backward, keyset, *inputs, softmax_scale, causal)


_library.impl("forward", _autograd_forward, "Autograd", with_keyset=True)
_library.impl("forward_lse", _autograd_forward_lse, "Autograd", with_keyset=True)
_library.impl("backward", _autograd_backward, "Autograd", with_keyset=True)
