"""The operators ``fa3::forward``, ``fa3::forward_lse`` and ``fa3::backward``, for torch.compile and autograd.

Each has one kernel for every device (it asks `fa3.backends` who computes), a fake for tracing, and an autograd
kernel. Gradients exist where the tiled backend computes; elsewhere asking for one raises, nothing is detached.

Each has an overload ``options`` for the calls that are not plain: defaults would do as well, but the dispatcher would
take its time over them in every plain call. The same functions stand behind both.

They are defined by ``torch.library.Library`` because the ``custom_op`` decorator costs 13 microseconds more a call,
as much as two launches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fa3 import backends
from fa3.backends import sdpa, tiled
from fa3.mods import MAX_AUX, BlockMask, MaskMod, ScoreMod, twin
from fa3.options import Options
from fa3.problem import check_forward, check_kinds

_library = torch.library.Library("fa3", "DEF")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal"
_GRADIENTS = (
    "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float? softmax_scale, bool causal"
)
# Those with which gradients are known come first.
_GRADIENT_OPTIONS = (
    "int window_left=-1, int window_right=-1, int attention_chunk=0, float softcap=0.0, Tensor? sink=None, "
    "Tensor? qv=None, bool? pack_gqa=None, int sm_margin=0"
)
# A modification is the name of its CuTe DSL twin, by which `fa3.mods.twin` finds the one in PyTorch, and at most two
# tensors. They are no list, since vmap knows no lists.
_OPTIONS = (
    f"{_GRADIENT_OPTIONS}, str score_mod='', Tensor? score_aux0=None, Tensor? score_aux1=None, str mask_mod='', "
    "Tensor? mask_aux0=None, Tensor? mask_aux1=None, Tensor? block_counts=None, Tensor? block_indices=None, "
    "int block_seqlen_q=0, int block_seqlen_k=0"
)
_library.define(f"forward({_ARGUMENTS}) -> Tensor")
_library.define(f"forward.options({_ARGUMENTS}, {_OPTIONS}) -> Tensor")
_library.define(f"forward_lse({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"forward_lse.options({_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"backward({_GRADIENTS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"backward.options({_GRADIENTS}, {_GRADIENT_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")

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
#: The same and the first eight options -> (dq, dk, dv, dsink, dqv), the last two of shape (0,) where the call had no
#: such input.
backward_options = torch.ops.fa3.backward.options

#: How many options `backward_options` takes, and where a tensor among them may require a gradient.
_GRADIENT_OPTION_COUNT = 8
_SINK, _QV = 4, 5


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


def flatten(options: Options) -> tuple[Any, ...]:
    """Options as the arguments of an operator that follow ``causal``."""
    block_mask = options.block_mask
    blocks: tuple[Any, ...] = ()
    if block_mask is not None:
        blocks = (block_mask.counts, block_mask.indices, block_mask.seqlen_q, block_mask.seqlen_k)
    mask_mod = options.mask_mod if block_mask is None else block_mask.mask_mod
    return (*options[:_GRADIENT_OPTION_COUNT], *_flatten_mod(options.score_mod), *_flatten_mod(mask_mod), *blocks)


def _flatten_mod(mod: ScoreMod | MaskMod | None) -> tuple[Any, ...]:
    return ("", None, None) if mod is None else (mod.cute, *mod.aux, *(None,) * (MAX_AUX - len(mod.aux)))


def _unflatten(arguments: tuple[Any, ...]) -> Options | None:
    """The options that `flatten` wrote, less those at the end that have their defaults: the dispatcher drops them."""
    if not arguments:
        return None
    common, rest = arguments[:_GRADIENT_OPTION_COUNT], arguments[_GRADIENT_OPTION_COUNT:]
    score_mod, mask_mod, block_mask = _unflatten_mods(*rest)
    return Options(*common)._replace(score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask)


def _unflatten_mods(
    score_mod: str = "",
    score_aux0: Tensor | None = None,
    score_aux1: Tensor | None = None,
    mask_mod: str = "",
    mask_aux0: Tensor | None = None,
    mask_aux1: Tensor | None = None,
    block_counts: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_seqlen_q: int = 0,
    block_seqlen_k: int = 0,
) -> tuple[ScoreMod | None, MaskMod | None, BlockMask | None]:
    score_aux, mask_aux = (
        tuple(tensor for tensor in pair if tensor is not None)
        for pair in ((score_aux0, score_aux1), (mask_aux0, mask_aux1))
    )
    score = ScoreMod(score_mod, twin(score_mod), score_aux) if score_mod else None
    mask = MaskMod(mask_mod, twin(mask_mod), mask_aux) if mask_mod else None
    if block_counts is None:
        return score, mask, None
    # A block mask complains about what is missing.
    blocks = BlockMask(mask, block_seqlen_q, block_seqlen_k, block_counts, block_indices)  # type: ignore[arg-type]
    return score, None, blocks


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
        return compute(q, k, v, softmax_scale, causal, return_lse, _unflatten(options))
    return compute(q, k, v, softmax_scale, causal, return_lse)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, ...]:
    # Only tiled makes graphs that come back here, so only tiled answers.
    return tiled.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal)[:3]


def _backward_options(
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
    gradients = tiled.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, _unflatten(options))
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


for _overload in ("", ".options"):
    _library.impl(f"forward{_overload}", _forward, "CompositeExplicitAutograd")
    _library.impl(f"forward_lse{_overload}", _forward_lse, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
_library.impl("backward.options", _backward_options, "CompositeExplicitAutograd")


# Fakes: shapes and dtypes without the numbers -----------------------------------------------------------------------


def _check_fakes(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, arguments: tuple[Any, ...]
) -> None:
    """Errors as the kernels raise them. Sizes that are symbols wait for the kernel: a check here would guard them."""
    options = _unflatten(arguments)
    check_kinds(q, k, v, options)
    tensors = (q, k, v, *(x for x in arguments if isinstance(x, Tensor)))
    numbers = (softmax_scale, *arguments, *(number for x in tensors for number in (*x.shape, *x.stride())))
    if not any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        check_forward(q, k, v, softmax_scale, causal, options=options)


@torch.library.register_fake("fa3::forward", lib=_library)
@torch.library.register_fake("fa3::forward.options", lib=_library)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any) -> Tensor:
    _check_fakes(q, k, v, softmax_scale, causal, options)
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


@torch.library.register_fake("fa3::forward_lse", lib=_library)
@torch.library.register_fake("fa3::forward_lse.options", lib=_library)
def _fake_forward_lse(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    _check_fakes(q, k, v, softmax_scale, causal, options)
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
    *options: Any,
) -> tuple[Tensor, ...]:
    _check_fakes(q, k, v, softmax_scale, causal, options)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("fa3::backward.options", lib=_library)
def _fake_backward_options(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    gradients = _fake_backward(dout, dlse, q, k, v, out, lse, *rest)
    optional = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in _sink_and_qv(rest[2:]))
    return *gradients, *optional


# Autograd -----------------------------------------------------------------------------------------------------------


def _sink_and_qv(options: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
    sink, qv, *_ = *options[_SINK : _QV + 1], None, None
    return sink, qv


def _require_gradient(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, *arguments: Any
) -> None:
    """Raise ``NotImplementedError`` where the backend of this call has no backward, or no backend has one."""
    options = _unflatten(arguments)
    if options is not None and (options.score_mod or options.mask_mod or options.block_mask):
        raise NotImplementedError(
            "flash_attn_func has no gradient with score_mod, mask_mod or block_mask yet, and an input requires one: "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    name = backends.for_device(q.device)
    if name == "sdpa" and backends.forced() is None:
        # FlashAttention-2 leaves some problems to tiled, and those do have gradients.
        problem = check_forward(q, k, v, softmax_scale, causal, options=options)
        name = "tiled" if sdpa.why_not(problem) is not None else name
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
    """Calls an operator below autograd, and answers with `backward` when gradients come back."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        return_lse: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        *options: Any,
    ) -> Any:
        operator = forward_lse_options if options else forward_lse
        out, lse = _redispatch(operator, keyset, q, k, v, softmax_scale, causal, *options)
        ctx.save_for_backward(q, k, v, out, lse, *_sink_and_qv(options))
        ctx.softmax_scale = softmax_scale
        ctx.causal = causal
        # Tensors are kept by autograd alone.
        ctx.options = [None if isinstance(x, Tensor) else x for x in options]
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sink_and_qv = ctx.saved_tensors
        options = list(ctx.options)
        # Before q, k and v come two arguments, after them two.
        answer: list[Tensor | None] = [None] * (7 + len(options))
        if dout is None and dlse is None:
            return tuple(answer)
        if dout is None:
            dout = torch.zeros_like(out)
        options[_SINK : _QV + 1] = sink_and_qv[: len(options[_SINK : _QV + 1])]
        operator = backward_options if options else backward
        gradients = operator(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, *options)
        for place, gradient in zip((2, 3, 4, 7 + _SINK, 7 + _QV), gradients, strict=False):
            if place < len(answer) and ctx.needs_input_grad[place]:
                answer[place] = gradient
        return tuple(answer)


class _Gradients(_SingleLevelFunction):
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


def _attend(operator: Any, return_lse: bool, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
    """What a forward operator answers, with a graph where an input requires a gradient."""
    _refuse_forward_mode(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        _require_gradient(*arguments)
        return _apply(_Attention, keyset, return_lse, *arguments)
    return _below_autograd(operator, keyset, *arguments)


def _differentiate(operator: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
    """What a backward operator answers, with a graph where an input requires a gradient."""
    _refuse_forward_mode(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return _apply(_Gradients, operator, keyset, *arguments)
    return _below_autograd(operator, keyset, *arguments)


for _name, _autograd in (
    ("forward", partial(_attend, forward, False)),
    ("forward.options", partial(_attend, forward_options, False)),
    ("forward_lse", partial(_attend, forward_lse, True)),
    ("forward_lse.options", partial(_attend, forward_lse_options, True)),
    ("backward", partial(_differentiate, backward)),
    ("backward.options", partial(_differentiate, backward_options)),
):
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)
