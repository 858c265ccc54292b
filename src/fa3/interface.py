"""The public functions, with the names, order and defaults of the FlashAttention-3 interface."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fa3 import ops
from fa3.backends import forward_for
from fa3.mods import BlockMask, MaskMod, ScoreMod
from fa3.options import Fp8, Options
from fa3.problem import check_bool, check_softmax_scale, named
from fa3.schemas import unpack
from fa3.tensor_checks import check_tensors

_OPEN_WINDOW = (-1, -1)
_NO_SOFTCAP = 0.0
#: What operators carry as an int.
_LARGEST_INT = 2**63 - 1
_ZERO, _ONE, _MINUS_ONE = 0, 1, -1

# Bound once: an attribute lookup is 20 ns, and the whole Python side of a call has about two microseconds.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_jit_tracing = torch._C._is_tracing
_is_profiling = torch._C._autograd._profiler_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack


def check_int(name: str, value: object, least: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{named(name, value)}: must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{named(name, value)}: allowed are {allowed}")
    # What is larger means the same: no sequence is so long, and no GPU so wide.
    return min(int(value), _LARGEST_INT)


def _check_window(window_size: object) -> tuple[int, int]:
    pair = "a pair (left, right) of ints, -1 for an open side"
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"{named('window_size', window_size)}: must be {pair}, not {type(window_size).__name__}")
    if len(window_size) != 2:
        raise ValueError(f"{named('window_size', window_size)}: must be {pair}")
    left = check_int("window_size[0]", window_size[0], -1, "-1 (open) and up")
    right = check_int("window_size[1]", window_size[1], -1, "-1 (open) and up")
    return left, right


def _is_open(*window_size: object) -> bool:
    return len(window_size) == 2 and window_size[0] is _MINUS_ONE and window_size[1] is _MINUS_ONE


def check_options(causal: bool, given: dict[str, Any]) -> tuple[bool, Options | None]:
    """Check the kinds of all arguments but q, k, v and the scale; returns the causal flag in force and the options.

    The options are ``None`` where they come to nothing. Numbers may be of any type that registers as one
    (numbers.Real, numbers.Integral: NumPy's do), flags are bools.
    """
    check_bool("causal", causal)
    for name in ("deterministic", "return_attn_probs", "return_lse"):
        check_bool(name, given[name])
    if given["pack_gqa"] is not None:
        check_bool("pack_gqa", given["pack_gqa"])
    left, right = _check_window(given["window_size"])
    # One way to say each mask: with 0 on the right it is causal, and then says nothing of the right.
    causal = causal or right == 0
    softcap = given["softcap"]
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"{named('softcap', softcap)}: must be a float, not {type(softcap).__name__}")
    try:
        cap = float(softcap)
    except OverflowError:
        # An int or a fraction. Its digits could fill pages.
        raise ValueError("softcap is too large for a float: must be finite and at least 0 (none)") from None
    # Comparisons and no math.isfinite: torch.compile may trace the number as a symbol.
    if not 0.0 <= cap < math.inf:
        raise ValueError(f"{named('softcap', softcap)}: must be finite and at least 0 (none)")
    if cap == 0.0 and softcap != 0:
        raise ValueError("softcap is too small for a float: must be 0 (none), or a positive float")
    splits = given["num_splits"]
    if check_int("num_splits", splits, 0, "0 (automatic) and 1") > 1:
        raise NotImplementedError(f"{named('num_splits', splits)} is not built yet: allowed are 0 and 1")
    if given["block_mask"] is not None and given["mask_mod"] is not None:
        raise ValueError("block_mask and mask_mod are both given: a block mask has a mask_mod of its own")
    if given["sink"] is not None and given["s_aux"] is not None:
        raise TypeError("sink and s_aux are both given: they are two names of one argument")
    for name in ("qv", "s_aux", "sink", "q_descale", "k_descale", "v_descale"):
        if given[name] is not None:
            check_tensors(**{name: given[name]})
    for name, kind in (("score_mod", ScoreMod), ("mask_mod", MaskMod), ("block_mask", BlockMask)):
        if given[name] is not None and not isinstance(given[name], kind):
            raise TypeError(f"{name} must be a fa3.{kind.__name__} or None, not {type(given[name]).__name__}")
    scales = given["q_descale"], given["k_descale"], given["v_descale"]
    options = Options(
        window_left=left,
        window_right=-1 if causal else right,
        attention_chunk=check_int("attention_chunk", given["attention_chunk"], 0, "0 (none) and up"),
        softcap=cap,
        sink=given["sink"] if given["s_aux"] is None else given["s_aux"],
        qv=given["qv"],
        pack_gqa=given["pack_gqa"],
        sm_margin=check_int("sm_margin", given["sm_margin"], 0, "0 and up"),
        deterministic=given["deterministic"],
        score_mod=given["score_mod"],
        mask_mod=given["mask_mod"],
        block_mask=given["block_mask"],
        fp8=None if all(scale is None for scale in scales) else Fp8(*scales),
    )
    return causal, None if _says_nothing(options) else options


def _says_nothing(options: Options) -> bool:
    return (
        (options.window_left, options.window_right, options.attention_chunk, options.softcap, options.sm_margin)
        == (-1, -1, 0, 0.0, 0)
        and options.pack_gqa is None
        and not options.deterministic
        and options.sink is None
        and options.qv is None
        and options.score_mod is None
        and options.mask_mod is None
        and options.block_mask is None
        and options.fp8 is None
    )


def _are_plain(options: Options) -> bool:
    """What is asked of q, k and v below, of the tensors among the options: a backend may read them as they are.

    Parameters pass, unlike for q, k and v: a sink mostly is one.
    """
    tensors: tuple[Tensor | None, ...] = (options.sink, options.qv)
    if options.fp8 is not None:
        tensors += options.fp8.tensors
    mask_mod = options.mask_mod
    if options.block_mask is not None:
        tensors += (options.block_mask.counts, options.block_mask.indices)
        mask_mod = options.block_mask.mask_mod
    for mod in (options.score_mod, mask_mod):
        if mod is not None:
            tensors += mod.aux
    recording = _is_grad_enabled()
    return all(
        x is None or (type(x) in (Tensor, Parameter) and not (recording and x.requires_grad) and not x.is_neg())
        for x in tensors
    )


def nobody_watches(q: Tensor, k: Tensor, v: Tensor, options: Options | None) -> bool:
    """Whether a backend may be called past the operators, as `flash_attn_func` says, which has this written out."""
    return (
        not _is_dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and not (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not _dispatch_modes()
        and not _function_modes()
        and not _is_profiling()
        and not _is_jit_tracing()
        and _functorch_transform() is None
        and forward_ad._current_level < 0
        and (options is None or _are_plain(options))
    )


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
    s_aux: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q k^T + mask) v``, for each batch element and head.

    Query heads that share a K/V head are consecutive: query head h reads K/V head ``h // (heads_q // heads_kv)``.
    Query i sits at key position ``p = i + seqlen_k - seqlen_q``: masks are aligned bottom-right. A query that sees no
    key has out 0 and LSE -inf, with a sink the LSE is the sink.

    A score is ``softmax_scale * (q · k + qv · v)``; then comes softcap, then score_mod, and then the masks, all of
    them, hide keys.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16 or, in multiples of 16 of head_dim, e4m3
            (torch.float8_e4m3fn), or int8 q and k beside e4m3 v; tiled backend: fp32 and fp64 too. The last stride is
            1, all others are free; the hopper and sdpa backends copy once what is not aligned to 16 bytes.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_kv divides heads_q.
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        softmax_scale: default ``head_dim ** -0.5``, with qv ``(head_dim + head_dim_v) ** -0.5``.
        causal: query i sees key j when ``j <= p``.
        qv: (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, last stride 1: adds ``qv · v`` to ``q · k``.
            Not with e4m3.
        q_descale, k_descale, v_descale: what e4m3 and int8 q, k and v are multiplied by, float32 (batch, heads_kv), any
            strides (0 for one number for all), positive; ``None`` is 1. A query head has the scale of its K/V head, or
            q_descale is (batch, heads_q). `fa3.quantize_qkv` makes finer scales.
        window_size: (left, right): query i sees keys ``p - left <= j <= p + right``; -1 is an open side, and
            ``causal`` makes the right one 0.
        attention_chunk: if positive, query i sees only keys of its chunk, of so many from
            ``attention_chunk * floor(p / attention_chunk)`` on.
        softcap: if positive, scaled scores s become ``softcap * tanh(s / softcap)``.
        num_splits: 0 or 1; a hint that changes no result.
        pack_gqa, sm_margin: hints. ``pack_gqa`` says whether query heads that share a K/V head share tiles,
            ``sm_margin`` how many multiprocessors to leave free.
        deterministic: gradients are bitwise the same from run to run; on Hopper that costs them time. So they also are
            if ``torch.use_deterministic_algorithms`` is on when they are computed. out and lse always are.
        return_attn_probs: the older name of ``return_lse``.
        return_lse: return (out, lse) in place of out.
        sink, s_aux: two names of one argument: (heads_q,), fp32, bf16 or fp16 (fp64 too beside fp64), one more logit a
            head that has no value; it enters the normaliser and the LSE.
        score_mod: a `fa3.ScoreMod` changes each score, by batch, query head, and indices of query and key.
        mask_mod: a `fa3.MaskMod` hides keys beside those that the other masks hide.
        block_mask: a `fa3.BlockMask` hides keys by the mask_mod that it was made from, and spares the blocks where it
            hides all. It goes with no mask_mod, causal, window_size or attention_chunk beside it.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, bf16 for e4m3, contiguous; with ``return_lse`` lse
        (batch, heads_q, seqlen_q), float32 (float64 for fp64 inputs): the natural log of the sum of exponentials
        of each row's scores.

    Both results are differentiable once, by q, k, v, sink and qv, with every option and on every backend; a gradient of
    lse costs no more than one of out alone. The graph keeps the inputs, out and lse, and the backward recomputes scores
    a tile at a time, so memory grows linearly with the lengths. A query that sees no key gets and gives gradient 0,
    whatever it holds, but for that of a sink by its LSE. On Hopper a call for which no backward kernel exists has its
    gradients computed by the tiled backend, with a warning. Tensors that a modification reads have no gradient, and
    neither has a call in e4m3: `fa3.flash_attn_fp8_func` has.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError: an option is not built yet, or a gradient is asked for that does not exist: by a tensor
            that a modification reads, a second one, or one in forward mode.
        FA3Error: the backend cannot run here.
    """
    # Identities: they are cheaper than equality, and true of no array, float or bool that only equals the number.
    # What fails them is looked at closely, and may still come to nothing.
    options = None
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
        and pack_gqa is None
        and deterministic is False
        and sm_margin is _ZERO
        and (return_attn_probs is False or return_attn_probs is True)
        and (return_lse is False or return_lse is True)
        and s_aux is None
        and sink is None
        and score_mod is None
        and mask_mod is None
        and block_mask is None
    ):
        causal, options = check_options(
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
                "s_aux": s_aux,
                "sink": sink,
                "score_mod": score_mod,
                "mask_mod": mask_mod,
                "block_mask": block_mask,
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
        and (options is None or _are_plain(options))
    ):
        try:
            if options is None:
                out, lse = forward_for(q)(q, k, v, softmax_scale, causal, with_lse)
            else:
                out, lse = forward_for(q)(q, k, v, softmax_scale, causal, with_lse, options)
        except RuntimeError:
            # Nested and sparse tensors refuse to tell shape or strides before any check has seen them.
            check_tensors(q=q, k=k, v=v)
            raise
        return (out, lse) if with_lse else out  # type: ignore[return-value]

    check_tensors(q=q, k=k, v=v)
    if softmax_scale is not None:
        check_softmax_scale(softmax_scale)
    return ops.attend(q, k, v, softmax_scale, causal, with_lse, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = _OPEN_WINDOW,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    s_aux: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of q, k and v that one projection has made: they are read where they lie.

    The gradient of ``qkv`` is written as one tensor, without the sum of three padded ones that slices of ``qkv`` would
    have.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with num_heads_q, (batch, seqlen, heads_q + 2 * heads_kv,
            head_dim): the query heads, then those of k, then those of v. The last stride is 1, all others are free.
        num_heads_q: heads_q of a qkv of 4 dims.
        All others: as `flash_attn_func` takes them.

    Returns:
        As `flash_attn_func`.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError, FA3Error: as `flash_attn_func`.
    """
    if num_heads_q is not None:
        num_heads_q = check_int("num_heads_q", num_heads_q, 0, "0 and up")
    check_tensors(qkv=qkv)
    if not (_is_grad_enabled() and qkv.requires_grad):
        q, k, v = unpack(qkv, num_heads_q)
        return flash_attn_func(
            q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
            softcap, 1, None, deterministic, sm_margin, return_attn_probs, return_lse, s_aux, sink, score_mod, mask_mod,
            block_mask,
        )  # fmt: skip
    options = None
    # As in flash_attn_func: what fails the identities is looked at closely.
    if not (
        (causal is False or causal is True)
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and window_size is _OPEN_WINDOW
        and attention_chunk is _ZERO
        and softcap is _NO_SOFTCAP
        and deterministic is False
        and sm_margin is _ZERO
        and (return_attn_probs is False or return_attn_probs is True)
        and (return_lse is False or return_lse is True)
        and s_aux is None
        and sink is None
        and score_mod is None
        and mask_mod is None
        and block_mask is None
    ):
        causal, options = check_options(
            causal,
            {
                "qv": None,
                "q_descale": q_descale,
                "k_descale": k_descale,
                "v_descale": v_descale,
                "window_size": window_size,
                "attention_chunk": attention_chunk,
                "softcap": softcap,
                "num_splits": 1,
                "pack_gqa": None,
                "deterministic": deterministic,
                "sm_margin": sm_margin,
                "return_attn_probs": return_attn_probs,
                "return_lse": return_lse,
                "s_aux": s_aux,
                "sink": sink,
                "score_mod": score_mod,
                "mask_mod": mask_mod,
                "block_mask": block_mask,
            },
        )
    if softmax_scale is not None:
        softmax_scale = check_softmax_scale(softmax_scale)
    return ops.attend_packed(qkv, num_heads_q, softmax_scale, causal, return_lse or return_attn_probs, options)
