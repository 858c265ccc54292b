"""Exact attention over tiles with an online softmax, in plain PyTorch: any device, any float dtype.

The forward follows the online softmax (Milakov and Gimelshein, arXiv:1805.02867) as FlashAttention uses it
(Dao et al., arXiv:2205.14135, algorithm 1); the backward recomputes each tile from the LSE (algorithm 4 there).
Memory is linear in the sequence lengths: no more than one tile of scores exists at a time.

fp16 and bf16 are computed in float32 throughout, float64 in float64; the result is rounded once. Autocast changes
nothing: it would round the products inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fa3.problem import Problem, check_forward

#: Keys of one tile.
TILE_N = 512

#: Score elements of one tile over all its heads: what stays in a CPU's caches, and what fills a GPU.
_TILE_SCORES_CPU = 1 << 20
_TILE_SCORES_GPU = 1 << 25

_LARGEST_TILE_M = 1024
_SMALLEST_TILE_M = 32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of the LSE: float64 for float64, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _tile_sizes(problem: Problem, device: torch.device) -> tuple[int, int, int]:
    """(sequences, queries, keys) of one tile, so that its scores stay within the budget of the device."""
    budget = _TILE_SCORES_CPU if device.type == "cpu" else _TILE_SCORES_GPU
    tile_n = min(TILE_N, max(problem.seqlen_k, 1))
    rows = budget // (tile_n * problem.heads_q)
    tile_m = min(max(rows, _SMALLEST_TILE_M), _LARGEST_TILE_M, problem.seqlen_q)
    sequences = max(1, budget // (tile_n * problem.heads_q * tile_m))
    return min(sequences, problem.batch), tile_m, tile_n


def _spans(length: int, step: int, first: int = 0) -> Iterator[tuple[int, int]]:
    for start in range(first, length, step):
        yield start, min(start + step, length)


def _by_head(x: Tensor, heads_kv: int, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, heads, d) -> (batch, heads_kv, group, seqlen, d), contiguous, in the dtype of the arithmetic.

    It may be a view of ``x``: never write to it.
    """
    batch, seqlen, heads, d = x.shape
    grouped = x.reshape(batch, seqlen, heads_kv, heads // heads_kv, d).permute(0, 2, 3, 1, 4)
    return grouped.to(dtype).contiguous()


def _keys_end(problem: Problem, row_end: int) -> int:
    """One past the last key that any query before ``row_end`` sees."""
    if not problem.causal:
        return problem.seqlen_k
    return max(0, min(problem.seqlen_k, row_end + problem.seqlen_k - problem.seqlen_q))


def _hide_future(scores: Tensor, problem: Problem, row: int, key: int) -> Tensor:
    """Mask a (..., rows, keys) tile that starts at query ``row`` and key ``key``, if the diagonal crosses it."""
    rows, keys = scores.shape[-2:]
    offset = problem.seqlen_k - problem.seqlen_q
    if not problem.causal or key + keys - 1 <= row + offset:
        return scores
    i = torch.arange(row, row + rows, device=scores.device)[:, None]
    j = torch.arange(key, key + keys, device=scores.device)[None, :]
    return scores.masked_fill_(j > i + offset, -torch.inf)


def _scores(q_tile: Tensor, k_tile: Tensor, problem: Problem, row: int, key: int) -> Tensor:
    """Masked scores of one tile, (batch, heads_kv, group, rows, keys); ``q_tile`` is already scaled."""
    batch, heads_kv, group, rows, head_dim = q_tile.shape
    # The query heads of a group share their K head, so they are rows of one matrix product.
    scores = q_tile.reshape(batch, heads_kv, group * rows, head_dim) @ k_tile.mT
    return _hide_future(scores.view(batch, heads_kv, group, rows, k_tile.shape[2]), problem, row, key)


def _times_keys(tile: Tensor, matrix: Tensor) -> Tensor:
    """(batch, heads_kv, group, rows, keys) @ (batch, heads_kv, keys, d) -> (batch, heads_kv, group, rows, d)."""
    batch, heads_kv, group, rows, keys = tile.shape
    return (tile.reshape(batch, heads_kv, group * rows, keys) @ matrix).view(batch, heads_kv, group, rows, -1)


def _over_rows(tile: Tensor, matrix: Tensor) -> Tensor:
    """Sum over the rows of the group: (b, hk, group, rows, keys)^T @ (b, hk, group, rows, d) -> (b, hk, keys, d)."""
    batch, heads_kv, group, rows, keys = tile.shape
    left = tile.reshape(batch, heads_kv, group * rows, keys)
    return left.mT @ matrix.reshape(batch, heads_kv, group * rows, -1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention by tiles; shapes, checks and errors as `fa3.problem.check_forward`.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, and lse (batch, heads_q, seqlen_q) in
        float32 (float64 for float64 inputs), or ``None`` without ``return_lse``.
    """
    with torch._C._DisableAutocast():
        return _forward(q, k, v, check_forward(q, k, v, softmax_scale, causal, return_lse))


def _forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor | None]:
    accumulate = accumulator_dtype(q.dtype)
    out = q.new_zeros(problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse = q.new_full((problem.batch, problem.heads_q, problem.seqlen_q), -torch.inf, dtype=accumulate)
    # Meta tensors have shapes and no numbers.
    if problem.empty or problem.seqlen_k == 0 or q.is_meta:
        return out, lse if problem.return_lse else None
    heads_kv = problem.heads_kv
    out_by_head = out.view(*out.shape[:2], heads_kv, problem.group_size, -1).permute(0, 2, 3, 1, 4)
    lse_by_head = lse.view(problem.batch, heads_kv, problem.group_size, problem.seqlen_q)
    sequences, tile_m, tile_n = _tile_sizes(problem, q.device)

    for b0, b1 in _spans(problem.batch, sequences):
        q_heads = _by_head(q[b0:b1], heads_kv, accumulate) * problem.softmax_scale
        k_heads = _by_head(k[b0:b1], heads_kv, accumulate).squeeze(2)
        v_heads = _by_head(v[b0:b1], heads_kv, accumulate).squeeze(2)
        for i0, i1 in _spans(problem.seqlen_q, tile_m):
            row_max = q_heads.new_full((*q_heads.shape[:3], i1 - i0, 1), -torch.inf)
            row_sum = torch.zeros_like(row_max)
            acc = q_heads.new_zeros(*q_heads.shape[:3], i1 - i0, problem.head_dim_v)
            for j0, j1 in _spans(_keys_end(problem, i1), tile_n):
                scores = _scores(q_heads[..., i0:i1, :], k_heads[:, :, j0:j1], problem, i0, j0)
                new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
                # A row that has seen no key yet has max -inf; 0 in its place keeps exp(-inf - max) at 0.
                reference_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
                probabilities = scores.sub_(reference_max).exp_()
                rescale = (row_max - reference_max).exp_()
                row_sum = row_sum.mul_(rescale).add_(probabilities.sum(dim=-1, keepdim=True))
                acc = acc.mul_(rescale).add_(_times_keys(probabilities, v_heads[:, :, j0:j1]))
                row_max = new_max
            seen = row_sum != 0.0
            out_by_head[b0:b1, :, :, i0:i1] = torch.where(seen, acc / row_sum, 0.0)
            tile_lse = torch.where(seen, row_max + row_sum.log(), -torch.inf)
            lse_by_head[b0:b1, :, :, i0:i1] = tile_lse.squeeze(-1)
    return out, lse if problem.return_lse else None


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`, recomputed tile by tile from the LSE.

    With P the probabilities, ``dV = P^T dO``, ``dP = dO V^T`` and ``dS = P * (dP - delta)`` where
    ``delta = rowsum(dO * O) - dLSE``: the derivative of the LSE with respect to the scores is P itself, so its
    gradient joins the row's correction.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads_q, head_dim_v), any strides.
        dlse: gradient of lse, (batch, heads_q, seqlen_q), or ``None``.
        q, k, v, softmax_scale, causal: as given to `forward`.
        out, lse: as returned by `forward`.

    Returns:
        dq, dk, dv: shapes and dtypes of q, k and v, contiguous.
    """
    with torch._C._DisableAutocast():
        return _backward(dout, dlse, q, k, v, out, lse, check_forward(q, k, v, softmax_scale, causal, True))


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    accumulate = accumulator_dtype(q.dtype)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if problem.empty or problem.seqlen_k == 0 or q.is_meta:
        return dq, dk, dv
    heads_kv, group = problem.heads_kv, problem.group_size
    sequences, tile_m, tile_n = _tile_sizes(problem, q.device)

    for b0, b1 in _spans(problem.batch, sequences):
        q_heads = _by_head(q[b0:b1], heads_kv, accumulate) * problem.softmax_scale
        k_heads = _by_head(k[b0:b1], heads_kv, accumulate).squeeze(2)
        v_heads = _by_head(v[b0:b1], heads_kv, accumulate).squeeze(2)
        dout_heads = _by_head(dout[b0:b1], heads_kv, accumulate)
        delta = (dout_heads * _by_head(out[b0:b1], heads_kv, accumulate)).sum(dim=-1, keepdim=True)
        row_lse = lse[b0:b1].reshape(b1 - b0, heads_kv, group, problem.seqlen_q, 1).to(accumulate)
        if dlse is not None:
            delta -= dlse[b0:b1].reshape(row_lse.shape).to(accumulate)
        # A row whose scores are all -inf has no probabilities: with +inf for its LSE, exp(score - lse) is 0, not NaN.
        no_keys = row_lse == -torch.inf
        row_lse = row_lse.masked_fill(no_keys, torch.inf)
        delta.masked_fill_(no_keys, 0.0)

        dk_heads, dv_heads = torch.zeros_like(k_heads), torch.zeros_like(v_heads)
        # Rows that the mask leaves without keys are not read: a NaN in them would pass through 0 * NaN.
        for i0, i1 in _spans(problem.seqlen_q, tile_m, problem.first_row_with_keys):
            q_tile = q_heads[..., i0:i1, :]
            dout_tile = dout_heads[..., i0:i1, :]
            dq_tile = torch.zeros_like(q_tile)
            for j0, j1 in _spans(_keys_end(problem, i1), tile_n):
                k_tile, v_tile = k_heads[:, :, j0:j1], v_heads[:, :, j0:j1]
                probabilities = _scores(q_tile, k_tile, problem, i0, j0).sub_(row_lse[..., i0:i1, :]).exp_()
                dv_heads[:, :, j0:j1] += _over_rows(probabilities, dout_tile)
                dscores = _times_keys(dout_tile, v_tile.mT).sub_(delta[..., i0:i1, :]).mul_(probabilities)
                dq_tile += _times_keys(dscores, k_tile)
                dk_heads[:, :, j0:j1] += _over_rows(dscores, q_tile)
            # q_heads carries the scale, and with it dk; dq still needs it.
            dq_rows = dq_tile.mul_(problem.softmax_scale).permute(0, 3, 1, 2, 4)
            dq[b0:b1, i0:i1] = dq_rows.reshape(b1 - b0, i1 - i0, problem.heads_q, problem.head_dim).to(dq.dtype)
        dk[b0:b1] = dk_heads.transpose(1, 2).to(dk.dtype)
        dv[b0:b1] = dv_heads.transpose(1, 2).to(dv.dtype)
    return dq, dk, dv
