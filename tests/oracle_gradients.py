"""Gradients to measure others against: autograd of the float64 oracle, and of plain PyTorch in the dtype of q."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fa3
from eager import masked_scores, with_sink

#: Inputs of a call that have gradients, in the order in which they are told here.
NAMES = ("q", "k", "v", "sink", "qv")


def _dense(options: dict[str, Any]) -> dict[str, Any]:
    """Options for functions that know no blocks; what changes no result is left out."""
    hints = ("block_mask", "pack_gqa", "sm_margin", "deterministic")
    dense = {name: value for name, value in options.items() if name not in hints}
    if options.get("block_mask") is not None:
        dense["mask_mod"] = options["block_mask"].mask_mod
    return dense


def _differentiate(
    attend: Any, inputs: dict[str, Tensor], dout: Tensor, dlse: Tensor | None, options: dict[str, Any]
) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        out, lse = attend(**leaves, **options)
        loss = (out * dout.to(out.dtype)).sum()
        if dlse is not None:
            # An infinite LSE is a constant.
            seen = lse.isfinite()
            loss = loss + (lse.masked_fill(~seen, 0.0) * dlse.to(lse.dtype).masked_fill(~seen, 0.0)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _inputs_of(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    given = {"q": q, "k": k, "v": v, **_dense(options)}
    inputs = {name: given[name] for name in NAMES if given.get(name) is not None}
    return inputs, {name: value for name, value in given.items() if name not in NAMES}


def oracle_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64, straight from the definition of attention.

    Args:
        dout: (batch, seqlen_q, heads_q, head_dim_v).
        dlse: (batch, heads_q, seqlen_q) or ``None``.
        q, k, v, options: as `fa3.flash_attn_func` takes them, tensors by name.

    Returns:
        ``"q"``, ``"k"``, ``"v"``, and ``"sink"`` and ``"qv"`` where the call has them; float64.
    """
    inputs, options = _inputs_of(q, k, v, options)
    inputs = {name: x.double() for name, x in inputs.items()}
    return _differentiate(fa3.reference, inputs, dout, dlse, options)


def eager_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The same by autograd of `eager_attention`, each in its input's own dtype."""
    inputs, options = _inputs_of(q, k, v, options)
    return _differentiate(eager_attention, inputs, dout, dlse, options)


def eager_attention(
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
    score_mod: fa3.ScoreMod | None = None,
    mask_mod: fa3.MaskMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as one writes it in PyTorch: products in the dtype of the inputs, softmax in float32."""
    heads, head_dim = q.shape[2:]
    heads_kv, head_dim_v = v.shape[2:]
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(heads // max(heads_kv, 1), dim=1) for x in (k, v))
    if softmax_scale is None:
        softmax_scale = (head_dim + (0 if qv is None else head_dim_v)) ** -0.5
    scores = (queries @ keys.mT).float()
    if qv is not None:
        scores = scores + (qv.transpose(1, 2) @ values.mT).float()
    scores = scores * softmax_scale
    scores = masked_scores(scores, causal, window_size, attention_chunk, softcap, score_mod, mask_mod)
    logits = with_sink(scores, sink)
    lse = torch.logsumexp(logits, dim=-1)
    # Not softmax: of a row that sees nothing its gradient is NaN.
    probabilities = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (probabilities.to(q.dtype) @ values).transpose(1, 2), lse


def errors(gradient: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest and root mean square error; 0 where there is nothing."""
    if gradient.numel() == 0:
        return 0.0, 0.0
    error = gradient.double() - expected
    return error.abs().max().item(), error.square().mean().sqrt().item()


def assert_gradients_accurate(
    gradients: dict[str, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slack: float = 1.0,
    **options: Any,
) -> None:
    """Every gradient has at most twice the error of eager PyTorch's, plus ``slack`` roundings of the largest value.

    ``gradients`` names the inputs as `oracle_gradients` does; others are not looked at.
    """
    expected = oracle_gradients(dout, dlse, q, k, v, **options)
    yardstick = eager_gradients(dout, dlse, q, k, v, **options)
    for name, gradient in gradients.items():
        assert gradient.shape == expected[name].shape, name
        assert gradient.dtype == yardstick[name].dtype, name
        assert torch.isfinite(gradient).all(), f"d{name} is not finite"
        # A sink of float32 has a gradient that was computed from an out of the dtype of q.
        rounding = slack * max(torch.finfo(dtype).eps for dtype in (gradient.dtype, q.dtype))
        sizes = errors(expected[name], torch.zeros_like(expected[name]))
        if name == "sink":
            sizes = (_size_of_terms_of_sinks(dout, dlse, q, k, v, options),) * 2
        allowed = errors(yardstick[name], expected[name])
        for kind, error, limit, size in zip(
            ("max", "rms"), errors(gradient, expected[name]), allowed, sizes, strict=True
        ):
            assert error <= 2 * limit + rounding * size, (
                f"{kind} error of d{name} is {error:.3g}, that of eager PyTorch {limit:.3g}, its size {size:.3g}"
            )


def _size_of_terms_of_sinks(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> float:
    """Norm of all products that add up to the gradient of a head's sink, of the largest head: their sum may cancel."""
    out, lse = fa3.reference(q, k, v, **_dense(options))
    squares = (out * dout.double()).square().sum(-1).mT + (0.0 if dlse is None else dlse.double().square())
    terms = torch.exp(options["sink"].double()[:, None] - lse).square() * squares
    return terms.sum((0, 2)).sqrt().max().item() if terms.numel() else 0.0
