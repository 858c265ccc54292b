"""NVIDIA GPUs from compute capability 8.0 on that are not Hopper: PyTorch's FlashAttention-2 operator.

It calls ``aten::_flash_attention_forward`` and not the public ``scaled_dot_product_attention``, because that one
aligns its causal mask top-left and returns no LSE. The kernel itself aligns bottom-right, as fa3 does, but reports
an LSE of +inf for rows without keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa3 import backends
from fa3.backends import tiled
from fa3.options import Options
from fa3.problem import Problem, check_forward

#: Grid dimensions y and z of the kernel hold batch and heads.
_MAX_GRID = 65_535


def why_not(problem: Problem) -> str | None:
    """What about the problem FlashAttention-2 cannot take, or ``None`` if it can."""
    if problem.dtype not in ("fp16", "bf16"):
        return f"dtype {problem.dtype}"
    if problem.head_dim != problem.head_dim_v:
        return f"head_dim {problem.head_dim} beside head_dim_v {problem.head_dim_v}"
    if max(problem.batch, problem.heads_q) > _MAX_GRID:
        return f"batch {problem.batch} and {problem.heads_q} heads: at most {_MAX_GRID} of each"
    options = {
        "window_size or attention_chunk": problem.mask == "window",
        f"softcap {problem.softcap}": problem.softcap > 0.0,
        "a sink": problem.sink,
        "qv": problem.qv,
        "score_mod": bool(problem.score_mod),
        "block_mask" if problem.block_sparse else "mask_mod": bool(problem.mask_mod),
    }
    return next((name for name, asked in options.items() if asked), None)


def _aligned(x: Tensor) -> Tensor:
    """The kernel reads 16 bytes at a time: copy what does not start or step at multiples of that."""
    elements = 16 // x.element_size()
    strided = (x.stride(dim) for dim in range(3) if x.shape[dim] > 1)
    if x.data_ptr() % 16 or any(stride % elements for stride in strided):
        return x.contiguous() if not x.is_contiguous() else x.clone()
    return x


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by FlashAttention-2; shapes, checks and errors as `fa3.problem.check_forward`.

    What the operator cannot take is computed by the tiled backend. Inputs that are not aligned to 16 bytes are
    copied once.

    Raises:
        NotImplementedError: ``FA3_BACKEND=sdpa`` forces this backend and the operator cannot take the problem.
    """
    problem = check_forward(q, k, v, softmax_scale, causal, return_lse, options)
    reason = why_not(problem)
    if reason is not None:
        if backends.forced() == "sdpa":
            raise NotImplementedError(f"the sdpa backend cannot take {reason}; FA3_BACKEND=tiled can")
        return tiled.forward(q, k, v, softmax_scale, causal, return_lse, options)
    first = problem.first_row_with_keys
    if problem.empty or first == problem.seqlen_q:
        out = q.new_zeros(problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
        shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        return out, q.new_full(shape, -torch.inf, dtype=torch.float32) if return_lse else None
    out, lse = torch.ops.aten._flash_attention_forward(
        _aligned(q),
        _aligned(k),
        _aligned(v),
        None,
        None,
        problem.seqlen_q,
        problem.seqlen_k,
        0.0,
        problem.mask == "causal",
        False,
        scale=problem.softmax_scale,
    )[:2]
    if first:
        out[:, :first] = 0.0
        lse[:, :, :first] = -torch.inf
    return out, lse if return_lse else None
