"""Checks of what goes with e4m3 q, k and v, for `fa3.problem`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa3.e4m3 import slots_of
from fa3.options import Fp8, is_fp8
from fa3.tensor_checks import check_device, check_shape, check_tensors

#: What users call the tensors of `Fp8`.
_SCALE_NAMES = ("q_descale", "k_descale", "v_descale", "v_scale_max")


def check_scale_kinds(q: Tensor, fp8: Fp8) -> None:
    for name, scale in zip(_SCALE_NAMES, fp8.tensors, strict=True):
        if scale is None:
            continue
        check_tensors(**{name: scale})
        if not is_fp8(q.dtype):
            raise TypeError(
                f"{name} is given, and q has dtype {q.dtype}: scales go with q, k and v of torch.float8_e4m3fn, or q "
                "and k of torch.int8"
            )
        if scale.dtype is not torch.float32:
            raise TypeError(f"{name} has dtype {scale.dtype}: must be torch.float32")
        check_device(name, scale, q)


def refuse_transposed(k: Tensor, v: Tensor) -> None:
    """Row-major V is meant; a V^T of the user's own would be taken for nonsense, or for another V."""
    _, seqlen_k, heads_kv, _ = k.shape
    if tuple(v.shape[1:3]) != (seqlen_k, heads_kv) and v.shape[1] == heads_kv and v.shape[3] >= seqlen_k:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}: v looks transposed, (batch, heads_kv, head_dim_v, "
            "seqlen_k). Pass it in rows, (batch, seqlen_k, heads_kv, head_dim_v), or let "
            "fa3.quantize_qkv(v_layout='transposed') make V^T, whose keys are in an order of their own, and call "
            "fa3.flash_attn_quantized_func"
        )


def describe_fp8(fp8: Fp8, v: Tensor, lengths: tuple[int, int, int], heads: tuple[int, int]) -> dict[str, Any]:
    """Check what goes with e4m3 against the sizes (batch, seqlen_q, seqlen_k) and (heads_q, heads_kv) of the call."""
    (batch, seqlen_q, seqlen_k), (heads_q, heads_kv) = lengths, heads
    if fp8.v_transposed:
        dims = "V^T (batch, heads_kv, head_dim_v, seqlen_k rounded up to 16)"
        check_shape("v", v, dims, (batch, heads_kv, v.shape[2], slots_of(seqlen_k)))
    if fp8.q_scale is not None:
        if fp8.q_block:
            dims = f"(batch, heads_q, ceil(seqlen_q / {fp8.q_block}))"
            check_shape("q_descale", fp8.q_scale, dims, (batch, heads_q, -(-seqlen_q // fp8.q_block)))
        elif tuple(fp8.q_scale.shape) not in ((batch, heads_kv), (batch, heads_q)):
            raise ValueError(
                f"q_descale has shape {tuple(fp8.q_scale.shape)}: must be (batch, heads_kv) or (batch, heads_q) = "
                f"{(batch, heads_kv)} or {(batch, heads_q)}"
            )
    for name, scale in (("k_descale", fp8.k_scale), ("v_descale", fp8.v_scale)):
        if scale is not None and fp8.k_block:
            dims = f"(batch, heads_kv, ceil(seqlen_k / {fp8.k_block}))"
            check_shape(name, scale, dims, (batch, heads_kv, -(-seqlen_k // fp8.k_block)))
        elif scale is not None:
            check_shape(name, scale, "(batch, heads_kv)", (batch, heads_kv))
        elif fp8.k_block:
            raise ValueError(f"{name} is None: must be given beside k_block={fp8.k_block}, a scale for each block")
    if fp8.v_scale_max is not None:
        check_shape("v_scale_max", fp8.v_scale_max, "(batch, heads_kv)", (batch, heads_kv))
    elif fp8.k_block:
        raise ValueError("v_scale_max is None: must be given, (batch, heads_kv), beside v scales of blocks")
    return {
        "out_dtype": fp8.out_dtype,
        "q_block": fp8.q_block,
        "k_block": fp8.k_block,
        "v_blocks": bool(fp8.k_block) and _differs(fp8.v_scale),
        "v_transposed": fp8.v_transposed,
        "two_level": fp8.two_level,
    }


def _differs(scale: Tensor | None) -> bool:
    """Whether the blocks of a head may have other scales than the first: one that is expanded to all is one."""
    return scale is not None and scale.shape[-1] > 1 and scale.stride(-1) != 0
