"""The public functions of FP8: quantize q, k and v to e4m3, attend to what was quantized, or do both, with gradients.

Official FlashAttention-3 takes e4m3 with one scale a head, as `fa3.flash_attn_func` does; these functions also do what
its paper describes: block quantization and incoherent processing (Shah et al., arXiv:2407.08608, section 3.3). q and k
may be int8 in the place of e4m3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fa3 import backends, fp8_ops, ops, quantization
from fa3.interface import check_int, check_options, nobody_watches
from fa3.mods import BlockMask, MaskMod, ScoreMod
from fa3.options import OUT_DTYPES, Fp8, Options
from fa3.problem import MAX_HEAD_DIM, check_bool, check_softmax_scale, named
from fa3.quantization import (
    BLOCK_CHOICES,
    MAX_SEED,
    QK_DTYPES,
    TWO_LEVEL_KEYS,
    QuantizedQKV,
    default_block,
    is_block,
)
from fa3.tensor_checks import check_device, check_strides, check_tensors, listed

_Rope = tuple[Tensor, Tensor]
_Block = tuple[int, int] | str

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_DTYPE_NAMES = {dtype: name for name, dtype in OUT_DTYPES.items()}


# Checks -------------------------------------------------------------------------------------------------------------


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has {tensor.dim()} dims, shape {tuple(tensor.shape)}: must be (batch, seqlen, heads, head_dim)"
            )
        if tensor.dtype not in allowed:
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed are {listed(allowed)}")
        check_strides(name, tensor)
        if tensor.shape[3] % 16 or not 16 <= tensor.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head dim (dim 3) {tensor.shape[3]}: allowed with e4m3 are the multiples of 16 from 16 to "
                f"{MAX_HEAD_DIM}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: must be the same")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on devices {q.device}, {k.device} and {v.device}: must be the same")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v have batch sizes {q.shape[0]}, {k.shape[0]} and {v.shape[0]}: must be the same")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k and v have lengths and heads (dims 1 and 2) {tuple(k.shape[1:3])} and {tuple(v.shape[1:3])}: must be "
            "the same"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k have head dims (dim 3) {q.shape[3]} and {k.shape[3]}: must be the same")
    if q.shape[2] and (k.shape[2] == 0 or q.shape[2] % k.shape[2]):
        raise ValueError(
            f"q has {q.shape[2]} heads, k and v have {k.shape[2]}: the number of query heads must be a multiple of the "
            "number of key and value heads"
        )


def _check_rope(rope: object, interleaved: object, q: Tensor, k: Tensor) -> _Rope | None:
    check_bool("interleaved", interleaved)
    if rope is None:
        if interleaved:
            raise ValueError("interleaved=True, rope=None: it says how rope makes pairs, and goes with it")
        return None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        given = f"{type(rope).__name__} of {len(rope)}" if isinstance(rope, (tuple, list)) else type(rope).__name__
        raise TypeError(f"rope must be a pair (cos, sin) of tensors, not {given}")
    cos, sin = rope
    for name, table in (("rope[0] (cos)", cos), ("rope[1] (sin)", sin)):
        check_tensors(**{name: table})
        if table.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{name} has dtype {table.dtype}: allowed are torch.float32 and that of q, {q.dtype}")
        check_device(name, table, q)
        if table.dim() != 2 or table.shape[1] != q.shape[3] // 2 or table.shape[0] < k.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}: must be (positions, head_dim / 2), at least "
                f"{(k.shape[1], q.shape[3] // 2)}"
            )
        if table.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} requires a gradient, which does not exist: detach it")
    if cos.dtype != sin.dtype or cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin of rope have dtypes {cos.dtype} and {sin.dtype}, shapes {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}: must be the same"
        )
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"q has length {q.shape[1]}, k {k.shape[1]}: with rope, q must not be longer, since its row i is at "
            "position i + seqlen_k - seqlen_q"
        )
    return cos, sin


def _check_block(block: object, head_dim: int, two_level: bool) -> _Block:
    if block is None:
        return default_block(head_dim, two_level)
    if isinstance(block, str):
        if block not in ("head", "tensor"):
            raise ValueError(f"block={block!r}: allowed are None, {BLOCK_CHOICES}")
        return block
    if not isinstance(block, (tuple, list)):
        raise TypeError(f"block={block!r}: must be None, {BLOCK_CHOICES}, not {type(block).__name__}")
    if not is_block(block):
        raise ValueError(f"block={block!r}: allowed are None, {BLOCK_CHOICES}")
    return int(block[0]), int(block[1])


def _check_seed(incoherent: object, seed: object) -> int | None:
    """The seed of the signs, ``None`` where there are none."""
    check_bool("incoherent", incoherent)
    number = check_int("seed", seed, 0, f"0 to {MAX_SEED}")
    if number > MAX_SEED:
        raise ValueError(f"{named('seed', seed)}: allowed are 0 to {MAX_SEED}")
    return number if incoherent else None


def _check_qk_dtype(qk_dtype: object) -> str:
    if not isinstance(qk_dtype, str) or qk_dtype not in QK_DTYPES:
        raise ValueError(f"qk_dtype={qk_dtype!r}: allowed are {' and '.join(map(repr, QK_DTYPES))}")
    return qk_dtype


def _check_two_level(two_level: object) -> None:
    if two_level is not None and two_level is not True and two_level is not False:
        raise TypeError(f"{named('two_level', two_level)}: must be True, False or None, not {type(two_level).__name__}")


def _check_options(fp8: Fp8, causal: bool, given: dict[str, Any]) -> tuple[bool, Options]:
    """Options of a call, which has those of ``given`` alone."""
    plain = dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale", "s_aux", "pack_gqa"))
    causal, options = check_options(
        causal, {**plain, "num_splits": 1, "deterministic": False, "return_attn_probs": False, **given}
    )
    return causal, (options or Options())._replace(fp8=fp8)


# Functions ----------------------------------------------------------------------------------------------------------


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    incoherent: bool = True,
    seed: int = 0,
    block: tuple[int, int] | str | None = None,
    v_layout: str = "row",
    qk_dtype: Literal["e4m3", "int8"] = "e4m3",
) -> QuantizedQKV:
    """Quantize q, k and v to e4m3 with scales; on Hopper one pass over each, rotary embedding included.

    What is done in which order, to the bit, is in `fa3.quantization`. It has no gradient: `flash_attn_fp8_func` has.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16 (fp32 too, except on Hopper). The last stride is 1;
            head_dim and head_dim_v are multiples of 16 up to 256.
        k: (batch, seqlen_k, heads_kv, head_dim).
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        rope: (cos, sin), each (positions, head_dim / 2), float32 or in the dtype of q: q and k are rotated first, in
            float32. Row j of k has position j, row i of q has position i + seqlen_k - seqlen_q.
        interleaved: pairs that rope rotates are columns (2i, 2i + 1), else (i, i + head_dim / 2).
        incoherent: multiply q and k by random signs and a Hadamard matrix, which changes no score, and spreads the
            outliers of a column over others, so that they cost less accuracy.
        seed: of the signs, 0 to ``2**31 - 1``. q and k that meet must have the same.
        block: (rows of q, rows of k and v) that share a scale, 64 or 128 of q, 64, 96 or 128 of k and v; ``"head"``:
            all rows of a head share one; ``"tensor"``: one scale for each of q, k and v. ``None``: of q and k blocks as
            suit the kernels, (64, 96) or (64, 128) by head_dim and by whether rows are long, of v one scale a head.
        v_layout: ``"row"``: v stays (batch, seqlen_k, heads_kv, head_dim_v); ``"transposed"``: V^T as the kernels
            read it, (batch, heads_kv, head_dim_v, seqlen_k rounded up to 16), keys in an order of their own.
        qk_dtype: what q and k become; v is always e4m3. ``"int8"`` rounds less, with ``incoherent``: its steps are
            even, so that without it an outlier leaves the rest of its block few of them. It has no NaN: what is not
            finite in q or k makes the scale of its block NaN.

    Returns:
        A `QuantizedQKV`, for `flash_attn_quantized_func`.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError: a tensor requires a gradient, which does not exist: `flash_attn_fp8_func` has one.
        FA3Error: the backend cannot run here.
    """
    on_hopper = isinstance(q, Tensor) and backends.for_device(q.device) == "hopper"
    _check_qkv(q, k, v, _SIXTEEN_BITS if on_hopper else (*_SIXTEEN_BITS, torch.float32))
    tables = _check_rope(rope, interleaved, q, k)
    if not isinstance(v_layout, str) or v_layout not in ("row", "transposed"):
        raise ValueError(f"v_layout={v_layout!r}: allowed are 'row' and 'transposed'")
    if torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, and quantize_qkv has none: call it under torch.no_grad, or "
                    "fa3.flash_attn_fp8_func, which has gradients"
                )
    return quantization.quantize_qkv(
        fp8_ops.quantize_tensor, q, k, v, tables, interleaved, _check_seed(incoherent, seed),
        _check_block(block, q.shape[3], k.shape[1] > TWO_LEVEL_KEYS), v_layout, block is None,
        _check_qk_dtype(qk_dtype),
    )  # fmt: skip


def flash_attn_quantized_func(
    x: QuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    block_mask: BlockMask | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    two_level: bool | None = None,
    return_lse: bool = False,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of what `quantize_qkv` made. It has no gradient: `flash_attn_fp8_func` has.

    Args:
        x: q, k and v with their scales.
        softmax_scale: default ``head_dim ** -0.5``.
        causal, window_size, attention_chunk, softcap, sink, block_mask, mask_mod, score_mod, return_lse, sm_margin: as
            `fa3.flash_attn_func` takes them.
        out_dtype: torch.bfloat16 or torch.float16.
        two_level: True: partial outputs are added in float32 and not in the tensor cores, which keep 14 bits. That
            costs time, and matters where rows are long. ``None`` leaves the choice to the plan.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v); with ``return_lse`` (out, lse), lse (batch, heads_q, seqlen_q)
        float32.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError: a gradient is asked for.
        FA3Error: the backend cannot run here.
    """
    if not isinstance(x, QuantizedQKV):
        raise TypeError(
            f"x must be a fa3.QuantizedQKV, as fa3.quantize_qkv makes it, not {type(x).__name__}; e4m3 tensors with "
            "one scale a head go to fa3.flash_attn_func"
        )
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in _DTYPE_NAMES:
        raise TypeError(f"out_dtype={out_dtype!r}: allowed are {listed(_DTYPE_NAMES)}")
    _check_two_level(two_level)
    causal, options = _check_options(
        fp8_ops.fp8_options(x, _DTYPE_NAMES[out_dtype], two_level),
        causal,
        {
            "window_size": window_size,
            "attention_chunk": attention_chunk,
            "softcap": softcap,
            "sink": sink,
            "block_mask": block_mask,
            "mask_mod": mask_mod,
            "score_mod": score_mod,
            "return_lse": return_lse,
            "sm_margin": sm_margin,
        },
    )
    if softmax_scale is not None:
        softmax_scale = check_softmax_scale(softmax_scale)
    if nobody_watches(x.q, x.k, x.v, options):
        out, lse = backends.forward_for(x.q)(x.q, x.k, x.v, softmax_scale, causal, return_lse, options)
        return (out, lse) if return_lse else out  # type: ignore[return-value]
    return ops.attend(x.q, x.k, x.v, softmax_scale, causal, return_lse, options)


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    incoherent: bool = True,
    seed: int = 0,
    block: tuple[int, int] | str | None = None,
    two_level: bool | None = None,
    return_lse: bool = False,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    qk_dtype: Literal["e4m3", "int8"] = "e4m3",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of 16-bit q, k and v, computed in e4m3, with 16-bit gradients: `quantize_qkv`, then attention.

    The backward is not quantized. Its gradients are those of exact attention in the dtype of q, of q and k after rope,
    with the out and lse of the e4m3 forward in place of its own (rounding passes gradients through unchanged: the
    straight-through estimator), and then back through rope. They are near those of the 16-bit function, not equal: the
    error of out and lse is in them, some percent where values have no outliers.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16. The last stride is 1; head_dim and head_dim_v are
            multiples of 16 up to 256.
        k: (batch, seqlen_k, heads_kv, head_dim).
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        softmax_scale: default ``head_dim ** -0.5``.
        rope, interleaved, incoherent, seed, block, qk_dtype: as `quantize_qkv` takes them. cos and sin have no
            gradient.
        two_level: as `flash_attn_quantized_func` takes it.
        causal, window_size, attention_chunk, softcap, sink, score_mod, mask_mod, block_mask, return_lse, deterministic,
            sm_margin: as `fa3.flash_attn_func` takes them.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q; with ``return_lse`` (out, lse), lse (batch,
        heads_q, seqlen_q) float32. Both are differentiable once, by q, k, v and sink.

    Raises:
        TypeError, ValueError: an argument is bad; the message says which, what was given and what is allowed.
        NotImplementedError: a gradient is asked for that does not exist, as `fa3.flash_attn_func` says.
        FA3Error: the backend cannot run here.
    """
    _check_qkv(q, k, v, _SIXTEEN_BITS)
    tables = _check_rope(rope, interleaved, q, k)
    _check_two_level(two_level)
    of_qk = _check_qk_dtype(qk_dtype)
    adds = k.shape[1] > TWO_LEVEL_KEYS if two_level is None else two_level
    number, rows = _check_seed(incoherent, seed), _check_block(block, q.shape[3], adds)
    causal, options = _check_options(
        # The same pass over V writes either layout, and the kernels read V^T without shuffling.
        Fp8(v_transposed=True, out_dtype=_DTYPE_NAMES[q.dtype], two_level=two_level),
        causal,
        {
            "window_size": window_size,
            "attention_chunk": attention_chunk,
            "softcap": softcap,
            "sink": sink,
            "block_mask": block_mask,
            "mask_mod": mask_mod,
            "score_mod": score_mod,
            "return_lse": return_lse,
            "sm_margin": sm_margin,
            "deterministic": deterministic,
        },
    )
    if softmax_scale is not None:
        softmax_scale = check_softmax_scale(softmax_scale)
    return fp8_ops.attend(
        q, k, v, tables, interleaved, number, rows, block is None, of_qk, softmax_scale, causal, return_lse, options
    )
