"""The public functions, with the names, order and defaults of the FlashAttention-3 interface."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa3 import ops
from fa3.backends import forward_for
from fa3.problem import check_bool, check_softmax_scale, check_tensors, named

_OPEN_WINDOW = (-1, -1)
_NO_SOFTCAP = 0.0
_ZERO, _ONE, _MINUS_ONE = 0, 1, -1

# Bound once: an attribute lookup is 20 ns, and the whole Python side of a call has about two microseconds.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_jit_tracing = torch._C._is_tracing
_is_profiling = torch._C._autograd._profiler_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack


def _check_int(name: str, value: object, least: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{named(name, value)}: must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{named(name, value)}: allowed are {allowed}")
    return int(value)


def _check_window(window_size: object, causal: bool) -> bool:
    """Whether the window amounts to the causal mask (True) or to none (False)."""
    pair = "a pair (left, right) of ints, -1 for an open side"
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"{named('window_size', window_size)}: must be {pair}, not {type(window_size).__name__}")
    if len(window_size) != 2:
        raise ValueError(f"{named('window_size', window_size)}: must be {pair}")
    left = _check_int("window_size[0]", window_size[0], -1, "-1 (open) and up")
    right = _check_int("window_size[1]", window_size[1], -1, "-1 (open) and up")
    if left == -1 and (causal or right in (-1, 0)):
        return causal or right == 0
    raise NotImplementedError(
        f"{named('window_size', (left, right))} is not built yet: allowed are (-1, -1) and, for the causal mask, "
        "(-1, 0)"
    )


def _is_open(*window_size: object) -> bool:
    return len(window_size) == 2 and window_size[0] is _MINUS_ONE and window_size[1] is _MINUS_ONE


def _check_options(causal: bool, options: dict[str, Any]) -> bool:
    """Accept hints, refuse what would change the result and is not built; returns the causal flag in force.

    Numbers may be of any type that registers as one (numbers.Real, numbers.Integral: NumPy's do), flags are bools.
    """
    for name in ("qv", "q_descale", "k_descale", "v_descale"):
        if options[name] is not None:
            raise NotImplementedError(f"{name} is not built yet: leave it None")
    check_bool("causal", causal)
    for name in ("deterministic", "return_attn_probs", "return_lse"):
        check_bool(name, options[name])
    if options["pack_gqa"] is not None:
        check_bool("pack_gqa", options["pack_gqa"])
    causal = _check_window(options["window_size"], causal)
    chunk = options["attention_chunk"]
    if _check_int("attention_chunk", chunk, 0, "0 (none) and up"):
        raise NotImplementedError(f"{named('attention_chunk', chunk)} is not built yet: leave it 0")
    softcap = options["softcap"]
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"{named('softcap', softcap)}: must be a float, not {type(softcap).__name__}")
    # Comparisons and no math.isfinite: torch.compile may trace the number as a symbol.
    if not 0.0 <= softcap < math.inf:  # type: ignore[operator]
        raise ValueError(f"{named('softcap', softcap)}: must be finite and at least 0 (none)")
    if softcap > 0.0:  # type: ignore[operator]
        raise NotImplementedError(f"{named('softcap', softcap)} is not built yet: leave it 0.0")
    splits = options["num_splits"]
    if _check_int("num_splits", splits, 0, "0 (automatic) and 1") > 1:
        raise NotImplementedError(f"{named('num_splits', splits)} is not built yet: allowed are 0 and 1")
    _check_int("sm_margin", options["sm_margin"], 0, "0 and up")
    return causal


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = _OPEN_WINDOW,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q k^T + mask) v``, for each batch element and head.

    Query heads that share a K/V head are consecutive: query head h reads K/V head ``h // (heads_q // heads_kv)``.
    A query that sees no key has out 0 and LSE -inf.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16 (tiled backend: fp32 and fp64 too). The last stride
            is 1, all others are free; the hopper and sdpa backends copy once what is not aligned to 16 bytes.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_kv divides heads_q.
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        softmax_scale: default ``head_dim ** -0.5``.
        causal: aligned bottom-right: query i sees key j when ``j <= i + seqlen_k - seqlen_q``.
        qv, q_descale, k_descale, v_descale: not built yet, must be None.
        window_size: (left, right), -1 for an open side. Built are (-1, -1) and (-1, 0), which is the causal mask.
        attention_chunk: not built yet, must be 0.
        softcap: not built yet, must be 0.0.
        num_splits: 0 or 1; a hint that changes no result.
        pack_gqa, deterministic, sm_margin: hints, accepted; results are deterministic in any case.
        return_attn_probs: the older name of ``return_lse``.
        return_lse: return (out, lse) in place of out.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, contiguous; with ``return_lse`` also lse
        (batch, heads_q, seqlen_q), float32 (float64 for fp64 inputs): the natural log of the sum of exponentials
        of each row's scaled scores. Both are differentiable where the tiled backend computes.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError: an option is not built yet, or a gradient is asked of a backend that has none.
        FA3Error: the backend cannot run here.
    """
    # Identities: they are cheaper than equality, and true of no array, float or bool that only equals the number.
    # What fails them is looked at closely, and may still be legal.
    if not (
        (causal is False or causal is True)
        and qv is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and (window_size is _OPEN_WINDOW or (type(window_size) is tuple and _is_open(*window_size)))
        and attention_chunk is _ZERO
        and (softcap is _NO_SOFTCAP or (type(softcap) is float and softcap == 0.0))
        and (num_splits is _ONE or num_splits is _ZERO)
        and (pack_gqa is None or pack_gqa is False or pack_gqa is True)
        and (deterministic is False or deterministic is True)
        and sm_margin is _ZERO
        and (return_attn_probs is False or return_attn_probs is True)
        and (return_lse is False or return_lse is True)
    ):
        causal = _check_options(
            causal,
            {
                "qv": qv,
                "q_descale": q_descale,
                "k_descale": k_descale,
                "v_descale": v_descale,
                "window_size": window_size,
                "attention_chunk": attention_chunk,
                "softcap": softcap,
                "num_splits": num_splits,
                "pack_gqa": pack_gqa,
                "deterministic": deterministic,
                "sm_margin": sm_margin,
                "return_attn_probs": return_attn_probs,
                "return_lse": return_lse,
            },
        )
    with_lse = return_lse or return_attn_probs
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = check_softmax_scale(softmax_scale)

    # Plain tensors, no gradient, nothing that watches or rewrites operators: the backend is called directly, which
    # spares the dispatcher's two microseconds. In all other cases the operators see to it.
    if (
        not _is_dynamo_compiling()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and not (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        # The memory of a negative view lacks the sign; the dispatcher adds it.
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not _dispatch_modes()
        and not _function_modes()
        and not _is_profiling()
        and not _is_jit_tracing()
        and _functorch_transform() is None
        and forward_ad._current_level < 0
    ):
        try:
            out, lse = forward_for(q)(q, k, v, softmax_scale, causal, with_lse)
        except RuntimeError:
            # Nested and sparse tensors refuse to tell shape or strides before any check has seen them.
            check_tensors(q=q, k=k, v=v)
            raise
        return (out, lse) if with_lse else out  # type: ignore[return-value]

    check_tensors(q=q, k=k, v=v)
    if softmax_scale is not None:
        check_softmax_scale(softmax_scale)
    if with_lse:
        return ops.forward_lse(q, k, v, softmax_scale, causal)
    return ops.forward(q, k, v, softmax_scale, causal)
