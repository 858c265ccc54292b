"""Changing scores and masking keys by functions of the caller's own, in FlexAttention's sense.

A modification is a pair of twins that say the same: one function in CuTe DSL, compiled into the kernel, and one in
PyTorch, for every other device. The CuTe twin is named by ``"module:function"`` and imported only to compile, so a
machine without a compiler can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fa3.spec import BLOCK as BLOCK

#: Tensors that a modification may read.
MAX_AUX = 2

#: Their dtypes, and the letter that stands for each in a spec.
AUX_DTYPES = {torch.float32: "f", torch.int32: "i"}

#: Dims that each may have.
MAX_AUX_DIMS = 3


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """``score_mod(score, batch, head, q_index, kv_index, *aux) -> score``, applied to the scaled score.

    Attributes:
        cute: ``"module:function"`` of the CuTe DSL twin, which takes (score: Float32, batch, head, q_index,
            kv_index: Int32, aux: tuple of cute.Tensor) and returns a Float32.
        torch: the PyTorch twin: takes (score, batch, head, q_index, kv_index, *aux), tensors that broadcast
            against each other, and returns the new scores.
        aux: tensors that both read: at most two, float32 or int32, contiguous, of 1 to 3 dims, on q's device.
    """

    cute: str
    torch: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class MaskMod:
    """``mask_mod(batch, head, q_index, kv_index, *aux) -> bool``: whether the query sees the key.

    Attributes: as `ScoreMod`, without the score; the CuTe DSL twin returns a Boolean.
    """

    cute: str
    torch: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of 128 queries x 128 keys a mask leaves empty, cuts, or leaves whole.

    Attributes:
        mask_mod: the mask.
        seqlen_q, seqlen_k: lengths it was made for.
        counts: int32 (batch or 1, heads_q or 1, query blocks, 2): how many blocks are cut, and how many whole.
        indices: int32 (batch or 1, heads_q or 1, query blocks, key blocks): the key blocks of each query block, those
            that are cut first and then the whole ones, each from the last to the first; what follows is not read. A
            block that ends behind the last key counts as cut.
    """

    mask_mod: MaskMod
    seqlen_q: int
    seqlen_k: int
    counts: Tensor
    indices: Tensor
