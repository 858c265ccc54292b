"""Exact attention over tiles with an online softmax, in plain PyTorch: any device, any float dtype.

The forward follows the online softmax (Milakov and Gimelshein, arXiv:1805.02867) as FlashAttention uses it
(Dao et al., arXiv:2205.14135, algorithm 1); the backward recomputes each tile from the LSE (algorithm 4 there).
Memory is linear in the sequence lengths: no more than one tile of scores exists at a time, and what autograd keeps of
a score modification is as large.

fp16, bf16 and e4m3 are computed in float32 throughout, float64 in float64; the result is rounded once. Autocast changes
nothing: it would round the products inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from fa3.mods import BLOCK, BlockMask, MaskMod, ScoreMod, check_answer
from fa3.options import Fp8, Options, fp8_of, out_dtype_of
from fa3.problem import Problem, check_forward
from fa3.quantization import dequantize, rows_of_transposed

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


def _spans(end: int, step: int, first: int = 0) -> Iterator[tuple[int, int]]:
    for start in range(first, end, step):
        yield start, min(start + step, end)


def _by_head(x: Tensor, heads_kv: int, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, heads, d) -> (batch, heads_kv, group, seqlen, d), contiguous, in the dtype of the arithmetic.

    It may be a view of ``x``: never write to it.
    """
    batch, seqlen, heads, d = x.shape
    grouped = x.reshape(batch, seqlen, heads_kv, heads // heads_kv, d).permute(0, 2, 3, 1, 4)
    return grouped.to(dtype).contiguous()


def _operands(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled q (batch, heads_kv, group, seqlen_q, columns), k (batch, heads_kv, seqlen_k, columns) and v likewise.

    ``q · k + qv · v`` is one product of longer rows: with qv there are head_dim + head_dim_v columns of q and k.
    """
    accumulate = accumulator_dtype(q.dtype)
    q_heads = _by_head(q, problem.heads_kv, accumulate)
    k_heads, v_heads = (_by_head(x, problem.heads_kv, accumulate).squeeze(2) for x in (k, v))
    if qv is not None:
        q_heads = torch.cat([q_heads, _by_head(qv, problem.heads_kv, accumulate)], dim=-1)
        k_heads = torch.cat([k_heads, v_heads], dim=-1)
    return q_heads * problem.softmax_scale, k_heads, v_heads


def _key_span(problem: Problem, row: int, row_end: int) -> tuple[int, int]:
    """First key that any query from ``row`` to before ``row_end`` sees by window and chunk, and one past the last."""
    left, right, chunk = problem.bounds
    first, last = (i + problem.seqlen_k - problem.seqlen_q for i in (row, row_end - 1))
    start = first - left if left >= 0 else 0
    end = last + right + 1 if right >= 0 else problem.seqlen_k
    if chunk:
        start = max(start, first // chunk * chunk)
        end = min(end, last // chunk * chunk + chunk)
    return max(start, 0), min(end, problem.seqlen_k)


def _hide(scores: Tensor, problem: Problem, row: int, key: int) -> Tensor:
    """Mask a (..., rows, keys) tile that starts at query ``row`` and key ``key``, if an edge of the mask crosses it."""
    rows, keys = scores.shape[-2:]
    left, right, chunk = problem.bounds
    first = row + problem.seqlen_k - problem.seqlen_q
    last = first + rows - 1
    position = torch.arange(first, last + 1, device=scores.device)[:, None]
    j = torch.arange(key, key + keys, device=scores.device)[None, :]
    hidden = []
    if left >= 0 and key < last - left:
        hidden.append(j < position - left)
    if right >= 0 and key + keys - 1 > first + right:
        hidden.append(j > position + right)
    if chunk and (key < last // chunk * chunk or key + keys > first // chunk * chunk + chunk):
        # Floor division, so that queries before the first key have chunks of their own.
        hidden.append(j // chunk != position // chunk)
    for mask in hidden:
        scores.masked_fill_(mask, -torch.inf)
    return scores


def _scores(q_tile: Tensor, k_tile: Tensor, softcap: float) -> Tensor:
    """Capped scores of one tile, (batch, heads_kv, group, rows, keys); ``q_tile`` is already scaled."""
    batch, heads_kv, group, rows, columns = q_tile.shape
    # The query heads of a group share their K head, so they are rows of one matrix product.
    scores = q_tile.reshape(batch, heads_kv, group * rows, columns) @ k_tile.mT
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    return scores.view(batch, heads_kv, group, rows, k_tile.shape[2])


@contextmanager
def _above_autograd() -> Iterator[None]:
    """Autograd sees what happens here, also inside of an operator, which runs below it."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded.remove(torch._C.DispatchKey.AutogradFunctionality)):
        yield


def _ask_twin(mod: ScoreMod | MaskMod, dtype: torch.dtype, shape: torch.Size, *arguments: Tensor) -> Tensor:
    """What the PyTorch twin of a modification answers; the floats that it reads are in the dtype of the arithmetic."""
    answer = mod.torch(*arguments, *(x.to(dtype) if x.is_floating_point() else x for x in mod.aux))
    wanted = "scores of a float dtype" if isinstance(mod, ScoreMod) else "a bool tensor"
    if not isinstance(answer, Tensor):
        raise TypeError(f"the PyTorch twin of {mod.cute} answered {type(answer).__name__}: must be {wanted}")
    if not answer.is_floating_point() if isinstance(mod, ScoreMod) else answer.dtype is not torch.bool:
        raise TypeError(f"the PyTorch twin of {mod.cute} answered {answer.dtype}: must be {wanted}")
    return check_answer(mod, answer, shape)


def _mask_mod(options: Options) -> MaskMod | None:
    return options.mask_mod if options.block_mask is None else options.block_mask.mask_mod


def _index(scores: Tensor, batch: int, row: int, key: int) -> list[Tensor]:
    """The numbers of sequences, heads, queries and keys of (batch, heads_q, rows, keys) scores, each in its dim."""
    return [
        torch.arange(start, start + size, device=scores.device).view([-1 if dim == other else 1 for other in range(4)])
        for dim, (start, size) in enumerate(zip((batch, 0, row, key), scores.shape, strict=True))
    ]


def _modify(scores: Tensor, options: Options, batch: int, row: int, key: int) -> Tensor:
    """Let modifications change and hide scores of a tile that starts at these sequence, query and key."""
    by_head = scores.flatten(1, 2)
    index = _index(by_head, batch, row, key)
    mod, mask_mod = options.score_mod, _mask_mod(options)
    if mod is not None:
        # A twin may carry a tensor in its closure, of which only autograd tells that it wants a gradient.
        watched: AbstractContextManager[None] = _above_autograd() if torch.is_grad_enabled() else nullcontext()
        with watched:
            answer = _ask_twin(mod, scores.dtype, by_head.shape, by_head, *index)
        if answer.requires_grad:
            raise NotImplementedError(
                f"the PyTorch twin of {mod.cute} reads a tensor that requires a gradient, and flash_attn_func has none "
                "for what modifications read: detach it, or call it under torch.no_grad()"
            )
        # Into our own memory: the answer may be a view of something that is not to be written.
        by_head.copy_(answer)
    if mask_mod is not None:
        by_head.masked_fill_(~_ask_twin(mask_mod, scores.dtype, by_head.shape, *index), -torch.inf)
    return scores


class _ModifiedTile:
    """Scores of one tile after its modifications, and the way back through them.

    Attributes:
        scores: changed and hidden, in memory of their own, in the shape of those given.
    """

    def __init__(self, scores: Tensor, options: Options, batch: int, row: int, key: int) -> None:
        by_head = scores.flatten(1, 2)
        index = _index(by_head, batch, row, key)
        mask_mod = _mask_mod(options)
        self._given = self._changed = None
        if options.score_mod is not None:
            with torch.inference_mode(False), _above_autograd(), torch.enable_grad():
                self._given = by_head.clone().requires_grad_()
                # A leaf may not be changed in place, and a twin may change its own argument.
                answer = _ask_twin(options.score_mod, scores.dtype, by_head.shape, self._given.clone(), *index)
                self._changed = answer.to(scores.dtype).expand(by_head.shape)
            by_head = self._changed.detach().clone(memory_format=torch.contiguous_format)
        if mask_mod is not None:
            by_head = by_head.masked_fill(~_ask_twin(mask_mod, scores.dtype, by_head.shape, *index), -torch.inf)
        self.scores = by_head.view(scores.shape)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The gradient of the scores before ``score_mod``, given that of those after it."""
        if self._given is None or self._changed is None:
            return gradient
        if not self._changed.requires_grad:
            return torch.zeros_like(gradient)
        with torch.inference_mode(False), _above_autograd():
            (pulled,) = torch.autograd.grad(
                self._changed, self._given, gradient.flatten(1, 2), allow_unused=True, materialize_grads=True
            )
        return pulled.view(gradient.shape)


def _blocks_to_visit(block_mask: BlockMask | None) -> Tensor | None:
    """Which blocks some head of some sequence has keys in: bool (query blocks, key blocks), in host memory."""
    if block_mask is None:
        return None
    indices = block_mask.indices.cpu().long()
    blocks = indices.shape[-1]
    listed = torch.arange(blocks) < block_mask.counts.cpu().sum(dim=-1, keepdim=True)
    # What follows the listed ones means nothing; it goes into a column of its own.
    indices = torch.where(listed, indices, blocks)
    visited = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool).scatter_(-1, indices, True)
    return visited[..., :blocks].any(dim=0).any(dim=0)


def _is_visited(visited: Tensor | None, row: int, row_end: int, key: int, key_end: int) -> bool:
    if visited is None:
        return True
    return bool(visited[row // BLOCK : -(-row_end // BLOCK), key // BLOCK : -(-key_end // BLOCK)].any())


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
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by tiles; shapes, checks and errors as `fa3.problem.check_forward`.

    A block mask is brought to the host, which waits for the device; no other call does.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, or of e4m3 in that which the options say, and lse
        (batch, heads_q, seqlen_q) in float32 (float64 for float64 inputs), or ``None`` without ``return_lse``.
    """
    with torch._C._DisableAutocast():
        problem = check_forward(q, k, v, softmax_scale, causal, return_lse, options)
        fp8, out_dtype = fp8_of(q.dtype, options), out_dtype_of(q.dtype, options)
        if fp8 is not None:
            q, k, v = _dequantize(q, k, v, fp8, problem)
        return _forward(q, k, v, problem, options or Options(), out_dtype)


def _dequantize(q: Tensor, k: Tensor, v: Tensor, fp8: Fp8, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """What e4m3 q, k and v stand for, in float32, v in rows."""
    if fp8.v_transposed:
        v = rows_of_transposed(v, problem.seqlen_k)
    q_scale = fp8.q_scale
    if q_scale is not None and q_scale.shape[1] != problem.heads_q:
        q_scale = q_scale.repeat_interleave(problem.group_size, dim=1)
    return (
        dequantize(q, q_scale, fp8.q_block),
        dequantize(k, fp8.k_scale, fp8.k_block),
        dequantize(v, fp8.v_scale, fp8.k_block),
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, options: Options, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    accumulate = accumulator_dtype(q.dtype)
    out_shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    out = q.new_zeros(out_shape, dtype=out_dtype)
    lse = q.new_full((problem.batch, problem.heads_q, problem.seqlen_q), -torch.inf, dtype=accumulate)
    # Meta tensors have shapes and no numbers.
    if problem.empty or q.is_meta:
        return out, lse if problem.return_lse else None
    heads_kv = problem.heads_kv
    out_by_head = out.view(*out.shape[:2], heads_kv, problem.group_size, -1).permute(0, 2, 3, 1, 4)
    lse_by_head = lse.view(problem.batch, heads_kv, problem.group_size, problem.seqlen_q)
    sequences, tile_m, tile_n = _tile_sizes(problem, q.device)
    modified = bool(problem.score_mod or problem.mask_mod)
    visited = _blocks_to_visit(options.block_mask)
    sink, qv = options.sink, options.qv
    if sink is not None:
        sink = sink.to(accumulate).view(heads_kv, problem.group_size, 1, 1)

    for b0, b1 in _spans(problem.batch, sequences):
        qv_rows = None if qv is None else qv[b0:b1]
        q_heads, k_heads, v_heads = _operands(q[b0:b1], k[b0:b1], v[b0:b1], qv_rows, problem)
        for i0, i1 in _spans(problem.seqlen_q, tile_m):
            row_max = q_heads.new_full((*q_heads.shape[:3], i1 - i0, 1), -torch.inf)
            row_sum = torch.zeros_like(row_max)
            acc = q_heads.new_zeros(*q_heads.shape[:3], i1 - i0, problem.head_dim_v)
            first_key, keys_end = _key_span(problem, i0, i1)
            for j0, j1 in _spans(keys_end, tile_n, first_key):
                if not _is_visited(visited, i0, i1, j0, j1):
                    continue
                scores = _scores(q_heads[..., i0:i1, :], k_heads[:, :, j0:j1], problem.softcap)
                if modified:
                    scores = _modify(scores, options, b0, i0, j0)
                scores = _hide(scores, problem, i0, j0)
                new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
                # A row that has seen no key yet has max -inf; 0 in its place keeps exp(-inf - max) at 0.
                reference_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
                probabilities = scores.sub_(reference_max).exp_()
                rescale = (row_max - reference_max).exp_()
                row_sum = row_sum.mul_(rescale).add_(probabilities.sum(dim=-1, keepdim=True))
                acc = acc.mul_(rescale).add_(_times_keys(probabilities, v_heads[:, :, j0:j1]))
                row_max = new_max
            if sink is not None:
                row_max, row_sum, acc = _add_sink(row_max, row_sum, acc, sink)
            seen = row_sum != 0.0
            out_by_head[b0:b1, :, :, i0:i1] = torch.where(seen, acc / row_sum, 0.0)
            tile_lse = torch.where(seen, row_max + row_sum.log(), -torch.inf)
            lse_by_head[b0:b1, :, :, i0:i1] = tile_lse.squeeze(-1)
    return out, lse if problem.return_lse else None


def _add_sink(row_max: Tensor, row_sum: Tensor, acc: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more logit, without a value, for rows that have seen all of their keys."""
    new_max = torch.maximum(row_max, sink)
    reference_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
    rescale = (row_max - reference_max).exp_()
    # Of a sink of +inf nothing but itself is left, and inf - inf would be NaN.
    weight = torch.where(sink == reference_max, 1.0, (sink - reference_max).exp())
    return new_max, row_sum * rescale + weight, acc * rescale


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
    options: Options | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `forward`, recomputed tile by tile from the LSE.

    With P the probabilities, ``dV = P^T dO``, ``dP = dO V^T`` and ``dS = P * (dP - delta)`` where
    ``delta = rowsum(dO * O) - dLSE``: the derivative of the LSE with respect to the scores is P itself, so its
    gradient joins the row's correction. dS goes back through a score_mod by autograd of its PyTorch twin, a tile at a
    time, and a softcap multiplies it by its slope, ``1 - (S / softcap)^2``. A sink has the probability
    ``exp(sink - LSE)`` and no value, so its gradient is ``-sum(exp(sink - LSE) * delta)``. qv is more columns of q,
    and v as many more of k, whose gradients dV gets too.

    Sums are taken in one order, so that gradients are bitwise the same from run to run.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads_q, head_dim_v), any strides.
        dlse: gradient of lse, (batch, heads_q, seqlen_q), or ``None``.
        q, k, v, softmax_scale, causal, options: as given to `forward`.
        out, lse: as returned by `forward`.
        into: tensors of the shapes and dtypes of q, k and v, last stride 1, that their gradients are written into.

    Returns:
        dq, dk, dv, dsink, dqv: shapes and dtypes of q, k, v, sink and qv, contiguous; ``None`` for the last two
        where the call had no such input. The first three are those of ``into``, if there are any.
    """
    with torch._C._DisableAutocast():
        problem = check_forward(q, k, v, softmax_scale, causal, True, options)
        if into is None:
            into = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
        return *into, *_backward(dout, dlse, q, k, v, out, lse, problem, options or Options(), *into)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    options: Options,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Write dq, dk and dv; return dsink and dqv."""
    accumulate = accumulator_dtype(q.dtype)
    sink, qv = options.sink, options.qv
    dqv = None if qv is None else qv.new_empty(qv.shape)
    if problem.empty or q.is_meta:
        for of_input in (dq, dk, dv):
            of_input.zero_()
        return None if sink is None else sink.new_zeros(sink.shape), dqv
    heads_kv, group, head_dim, softcap = problem.heads_kv, problem.group_size, problem.head_dim, problem.softcap
    sequences, tile_m, tile_n = _tile_sizes(problem, q.device)
    first_row = problem.first_row_with_keys
    modified = bool(problem.score_mod or problem.mask_mod)
    visited = _blocks_to_visit(options.block_mask)
    dsink = None
    if sink is not None:
        sink_heads = sink.to(accumulate).view(heads_kv, group, 1, 1)
        dsink = torch.zeros_like(sink_heads)
    for of_queries in (dq, dqv):
        if of_queries is not None:
            of_queries[:, :first_row] = 0.0

    for b0, b1 in _spans(problem.batch, sequences):
        qv_rows = None if qv is None else qv[b0:b1]
        q_heads, k_heads, v_heads = _operands(q[b0:b1], k[b0:b1], v[b0:b1], qv_rows, problem)
        dout_heads = _by_head(dout[b0:b1], heads_kv, accumulate)
        out_heads = _by_head(out[b0:b1], heads_kv, accumulate)
        # The out of a row without keys is the constant 0: what is NaN in its gradient must not count.
        delta = (dout_heads * out_heads).masked_fill_(out_heads == 0.0, 0.0).sum(dim=-1, keepdim=True)
        row_lse = lse[b0:b1].reshape(b1 - b0, heads_kv, group, problem.seqlen_q, 1).to(accumulate)
        if dlse is not None:
            delta -= dlse[b0:b1].reshape(row_lse.shape).to(accumulate)
        # A row whose scores are all -inf has no probabilities: with +inf for its LSE, exp(score - lse) is 0, not NaN.
        no_keys = row_lse == -torch.inf
        row_lse = row_lse.masked_fill(no_keys, torch.inf)
        delta.masked_fill_(no_keys, 0.0)
        if dsink is not None:
            dsink -= (_sink_probability(sink_heads, row_lse) * delta).sum(dim=(0, 3), keepdim=True)[0]

        dk_heads, dv_heads = torch.zeros_like(k_heads), torch.zeros_like(v_heads)
        # The same rows are not read: a NaN in them would pass through 0 * NaN.
        for i0, i1 in _spans(problem.seqlen_q, tile_m, first_row):
            q_rows, dout_rows = q_heads[..., i0:i1, :], dout_heads[..., i0:i1, :]
            dq_tile = torch.zeros_like(q_rows)
            first_key, keys_end = _key_span(problem, i0, i1)
            for j0, j1 in _spans(keys_end, tile_n, first_key):
                if not _is_visited(visited, i0, i1, j0, j1):
                    continue
                q_tile, dout_tile = q_rows, dout_rows
                k_tile, v_tile = k_heads[:, :, j0:j1], v_heads[:, :, j0:j1]
                scores = _scores(q_tile, k_tile, softcap)
                # Before the mask, whose -inf have no slope.
                slope = 1.0 - (scores / softcap).square_() if softcap else None
                tile = _ModifiedTile(scores, options, b0, i0, j0) if modified else None
                scores = scores if tile is None else tile.scores
                probabilities = _hide(scores, problem, i0, j0).sub_(row_lse[..., i0:i1, :]).exp_()
                if tile is not None:
                    hidden = probabilities == 0.0
                    sees_none = hidden.all(dim=-1, keepdim=True)
                    q_tile, dout_tile = (x.masked_fill(sees_none, 0.0) for x in (q_tile, dout_tile))
                dv_heads[:, :, j0:j1] += _over_rows(probabilities, dout_tile)
                dscores = _times_keys(dout_tile, v_tile.mT).sub_(delta[..., i0:i1, :]).mul_(probabilities)
                if tile is not None:
                    # Of a hidden score a modification may answer anything, with a slope of any kind.
                    dscores = tile.pull_back(dscores.masked_fill_(hidden, 0.0)).masked_fill(hidden, 0.0)
                if slope is not None:
                    dscores.mul_(slope if tile is None else slope.masked_fill_(hidden, 0.0))
                dq_tile += _times_keys(dscores, k_tile)
                dk_heads[:, :, j0:j1] += _over_rows(dscores, q_tile)
            # q_heads carries the scale, and with it dk; dq still needs it.
            dq_rows = dq_tile.mul_(problem.softmax_scale).permute(0, 3, 1, 2, 4).flatten(2, 3)
            dq[b0:b1, i0:i1] = dq_rows[..., :head_dim].to(dq.dtype)
            if dqv is not None:
                dqv[b0:b1, i0:i1] = dq_rows[..., head_dim:].to(dq.dtype)
        if qv is not None:
            dv_heads += dk_heads[..., head_dim:]
        dk[b0:b1] = dk_heads[..., :head_dim].transpose(1, 2).to(dk.dtype)
        dv[b0:b1] = dv_heads.transpose(1, 2).to(dv.dtype)
    return None if dsink is None or sink is None else dsink.flatten().to(sink.dtype), dqv


def _sink_probability(sink: Tensor, lse: Tensor) -> Tensor:
    """``exp(sink - lse)``, which is 1 also where both are +inf."""
    return torch.where(sink == lse, 1.0, (sink - lse).exp())
