"""What eager attention in PyTorch does, for the tests that measure others against it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fa3
from fa3.reference import visible_keys


def masked_scores(
    scores: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    score_mod: fa3.ScoreMod | None,
    mask_mod: fa3.MaskMod | None,
) -> Tensor:
    """Scaled scores (batch, heads_q, seqlen_q, seqlen_k) behind cap, modification and masks: -inf is hidden."""
    batch, heads, seqlen_q, seqlen_k = scores.shape
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    index = [torch.arange(size, device=scores.device) for size in (batch, heads, seqlen_q, seqlen_k)]
    index = [numbers.view([-1 if dim == i else 1 for dim in range(4)]) for i, numbers in enumerate(index)]
    if score_mod is not None:
        scores = score_mod.torch(scores, *index, *score_mod.aux)
    seen = visible_keys(seqlen_q, seqlen_k, causal, window_size, attention_chunk, scores.device)
    if mask_mod is not None:
        seen = seen & mask_mod.torch(*index, *mask_mod.aux)
    return scores.masked_fill(~seen, -math.inf)


def with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Scores, and beside those of each row its head's sink, if there is one."""
    if sink is None:
        return scores
    batch, _, seqlen_q, _ = scores.shape
    return torch.cat([scores, sink.float()[None, :, None, None].expand(batch, -1, seqlen_q, 1)], dim=-1)


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result
