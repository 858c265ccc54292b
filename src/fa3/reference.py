"""Attention straight from its definition, in float64: the oracle that every other path is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.mods import MaskMod, ScoreMod, check_answer, check_sizes
from fa3.problem import check_bool, check_softmax_scale
from fa3.tensor_checks import check_tensors

#: Score elements (8 bytes each, a few of them alive at once) computed in one step.
_SCORES_PER_STEP = 1 << 25


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees: bool (seqlen_q, seqlen_k).

    All masks are aligned bottom-right: query i sits at key position ``p = i + seqlen_k - seqlen_q``.
    Window (l, r) shows keys ``p - l <= j <= p + r``, -1 leaves that side open, ``causal`` forces r = 0;
    ``attention_chunk`` c shows keys ``c * floor(p / c) <= j < c * floor(p / c) + c``.
    """
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    left, right = window_size
    if causal:
        right = 0
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    if attention_chunk > 0:
        first = attention_chunk * torch.div(position, attention_chunk, rounding_mode="floor")
        visible &= (key >= first) & (key < first + attention_chunk)
    return visible


def _twin(mod: ScoreMod | MaskMod, shape: tuple[int, ...], *arguments: Tensor) -> Tensor:
    """What the PyTorch twin of a modification answers for scores of a shape, its own tensors in float64 too."""
    answer = mod.torch(*arguments, *(x.double() if x.is_floating_point() else x for x in mod.aux))
    if not isinstance(answer, Tensor) or (answer.dtype is torch.bool) is not isinstance(mod, MaskMod):
        answered = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
        wanted = "a bool tensor" if isinstance(mod, MaskMod) else "a tensor of scores"
        raise TypeError(f"the PyTorch twin of {mod.cute} answered {answered}: must be {wanted}")
    return check_answer(mod, answer, shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    sink: Tensor | None,
    visible: Tensor,
    softmax_scale: float,
    softcap: float,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    index: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    """q (heads, rows, d), k (heads, keys, d), v (heads, keys, dv), sink (heads,) -> out (heads, rows, dv), lse.

    ``index``: the numbers of the sequence, heads, queries and keys, each in its dim of (1, heads, rows, keys).
    """
    scores = q @ k.mT
    if qv is not None:
        scores = scores + qv @ v.mT
    scores = scores * softmax_scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        scores = _twin(score_mod, (1, *scores.shape), scores[None], *index).double().expand(1, *scores.shape)[0]
    if mask_mod is not None:
        visible = visible & _twin(mask_mod, (1, *scores.shape), *index).expand(1, *scores.shape)[0]
    scores = scores.masked_fill(~visible, -torch.inf)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    # A row without keys has LSE -inf; subtracting 0 there leaves exp(-inf) = 0 in place of a NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    probabilities = torch.exp(scores - shift[..., None])
    return probabilities @ v, lse


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    qv: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T + mask) v`` in float64 on the device of q, differentiable by autograd.

    It materialises scores, some heads and rows at a time, and knows every mask option of the API.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any float dtype and any strides.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_kv divides heads_q, consecutive query heads share one.
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        softmax_scale: default ``head_dim ** -0.5``, with qv ``(head_dim + head_dim_v) ** -0.5``.
        causal: key j is seen by query i when ``j <= i + seqlen_k - seqlen_q``.
        window_size, attention_chunk: see `visible_keys`.
        softcap: if positive, scaled scores s become ``softcap * tanh(s / softcap)``.
        sink: (heads_q,): one more logit a head that has no value; it enters the normaliser and the LSE.
        qv: (batch, seqlen_q, heads_q, head_dim_v): adds ``qv · v`` to ``q · k`` before scaling.
        score_mod: changes the scaled and capped score by its PyTorch twin, in float64.
        mask_mod: hides keys beside those that the other masks hide; that of a block mask is its ``mask_mod``.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), both float64. LSE is the
        natural log of the sum of exponentials of the row. A row that sees no key has out 0 and LSE -inf
        (with a sink: LSE = sink).

    Raises:
        TypeError: not a tensor, not a float dtype, a scale that is no number, a causal that is no bool, no `ScoreMod`
            or `MaskMod`, or a twin of one that answers no such thing.
        ValueError: shapes or devices do not fit, a scale that is not finite and positive, a window below -1, or a
            negative chunk or softcap.
    """
    optional = {name: tensor for name, tensor in (("sink", sink), ("qv", qv)) if tensor is not None}
    tensors: dict[str, Tensor] = {"q": q, "k": k, "v": v, **optional}
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: must be a float dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on devices {q.device}, {k.device} and {v.device}: must be the same")
    if softmax_scale is not None:
        softmax_scale = check_softmax_scale(softmax_scale)
    check_bool("causal", causal)
    for name, mod, kind in (("score_mod", score_mod, ScoreMod), ("mask_mod", mask_mod, MaskMod)):
        if mod is not None and not isinstance(mod, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, not {type(mod).__name__}")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dims: each must have 4")
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = v.shape[1:]
    if tuple(k.shape) != (batch, seqlen_k, heads_kv, head_dim) or v.shape[0] != batch:
        raise ValueError(f"shapes of q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"q has {heads_q} heads, k and v have {heads_kv}: must divide")
    if min(window_size) < -1 or attention_chunk < 0 or softcap < 0.0:
        raise ValueError(
            f"window_size={window_size}, attention_chunk={attention_chunk}, softcap={softcap}: "
            "windows are at least -1, the others at least 0"
        )
    if sink is not None and tuple(sink.shape) != (heads_q,):
        raise ValueError(f"sink has shape {tuple(sink.shape)}: must be (heads_q,) = ({heads_q},)")
    if qv is not None and tuple(qv.shape) != (batch, seqlen_q, heads_q, head_dim_v):
        expected = (batch, seqlen_q, heads_q, head_dim_v)
        raise ValueError(f"qv has shape {tuple(qv.shape)}: must be (batch, seqlen_q, heads_q, head_dim_v) = {expected}")
    for mod in (score_mod, mask_mod):
        if mod is not None:
            check_sizes(mod, batch, heads_q, seqlen_q, seqlen_k)
    if softmax_scale is None:
        softmax_scale = float((head_dim + (0 if qv is None else head_dim_v)) ** -0.5)

    if 0 in (batch, seqlen_q, heads_q):
        empty_out = q.new_zeros((batch, seqlen_q, heads_q, head_dim_v), dtype=torch.float64)
        return empty_out, q.new_zeros((batch, heads_q, seqlen_q), dtype=torch.float64)
    visible = visible_keys(seqlen_q, seqlen_k, causal, window_size, attention_chunk, q.device)
    heads_per_step = max(1, min(heads_q, _SCORES_PER_STEP // max(1, seqlen_q * seqlen_k)))
    rows_per_step = max(1, min(seqlen_q, _SCORES_PER_STEP // max(1, heads_per_step * seqlen_k)))
    kv_head = torch.arange(heads_q, device=q.device) // (heads_q // heads_kv)
    numbers = [torch.arange(size, device=q.device) for size in (batch, heads_q, seqlen_q, seqlen_k)]

    outs, lses = [], []
    for b in range(batch):
        head_outs, head_lses = [], []
        for h0 in range(0, heads_q, heads_per_step):
            heads = slice(h0, h0 + heads_per_step)
            k_heads = k[b, :, kv_head[heads]].transpose(0, 1).double()
            v_heads = v[b, :, kv_head[heads]].transpose(0, 1).double()
            row_outs, row_lses = [], []
            for i0 in range(0, seqlen_q, rows_per_step):
                rows = slice(i0, i0 + rows_per_step)
                out, lse = _attend(
                    q[b, rows, heads].transpose(0, 1).double(),
                    k_heads,
                    v_heads,
                    None if qv is None else qv[b, rows, heads].transpose(0, 1).double(),
                    None if sink is None else sink[heads].double(),
                    visible[rows],
                    softmax_scale,
                    softcap,
                    score_mod,
                    mask_mod,
                    (
                        numbers[0][b].view(1, 1, 1, 1),
                        numbers[1][heads].view(1, -1, 1, 1),
                        numbers[2][rows].view(1, 1, -1, 1),
                        numbers[3].view(1, 1, 1, -1),
                    ),
                )
                row_outs.append(out)
                row_lses.append(lse)
            head_outs.append(torch.cat(row_outs, dim=1))
            head_lses.append(torch.cat(row_lses, dim=1))
        outs.append(torch.cat(head_outs, dim=0).transpose(0, 1))
        lses.append(torch.cat(head_lses, dim=0))
    return torch.stack(outs), torch.stack(lses)
