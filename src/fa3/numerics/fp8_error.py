"""The error of attention in e4m3, by how it is quantized: the experiment of the FlashAttention-3 paper, on any device.

Entries of q, k and v have outliers, everything is quantized, attention is computed as the kernels do it, and the error
is the root mean square of the difference to float64 (Shah et al., arXiv:2407.08608, section 4.3, table 3).

What is emulated: e4m3 q, k and v, or q and k in int8, with their scales, and the rounding of probabilities to e4m3, 2^8
times as large and times the scale of V of their block; the row sums are those of the rounded ones. What is not: sums
are exact, where tensor cores keep 14 bits; and probabilities are relative to the largest score of the whole row, which
is rounded as 2^8, where kernels have a reference of the keys so far, and the largest is from 2^5 to 448.

What rotation does: e4m3 has steps relative to each value, so an outlier costs its neighbours nothing; what it costs is
its own rounding. The error of a score is about ``step * sqrt(sum (q_c k_c)^2)``, and after rotation ``step * |q| |k| /
sqrt(d)``. Rotation helps where q and k are large in the same columns, does little where one of them is, and would harm
where they are large in different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa3.quantization import (
    QuantizedQKV,
    default_block,
    quantize_qkv,
    quantize_tensor,
    rows_of_transposed,
    to_e4m3,
)

#: Probabilities are this many times as large when they are rounded: e4m3 reaches 448.
P_SCALE = 256.0


class Choice(NamedTuple):
    """How q, k and v are quantized, as `fa3.quantize_qkv` takes it."""

    block: str | None
    incoherent: bool
    qk_dtype: Literal["e4m3", "int8"] = "e4m3"


CHOICES: dict[str, Choice] = {
    "tensor": Choice("tensor", False),
    "tensor, incoherent": Choice("tensor", True),
    "head": Choice("head", False),
    "head, incoherent": Choice("head", True),
    "block": Choice(None, False),
    "block, incoherent": Choice(None, True),
    "block, incoherent, int8": Choice(None, True, "int8"),
}


# Data ---------------------------------------------------------------------------------------------------------------


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _spiky(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    spikes = 10.0 * _randn(shape, generator) * (_rand(shape, generator) < 0.001)
    return _randn(shape, generator) + spikes


def _channels(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Factors of the columns of each head: 1, but 20 to 50 for two of them."""
    heads, head_dim = shape[-2:]
    columns = _rand((heads, head_dim), generator).topk(2).indices
    factors = torch.ones(heads, head_dim, device=generator.device)
    return factors.scatter(1, columns, 20.0 + 30.0 * _rand((heads, 2), generator))


def paper_outliers(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """``N(0, 1) + N(0, 100) * Bernoulli(0.001)``: one entry of a thousand is about ten times as large."""
    q, k, v = (_spiky(shape, generator) for _ in range(3))
    return q, k, v


def channel_outliers(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """``N(0, 1)``, two columns of each head 20 to 50 times as large, the same ones in q and k.

    Their products are most of a score, and so is their rounding. q is divided until scores have a standard deviation of
    about 3, as trained models have it.
    """
    factors = _channels(shape, generator)
    q, k = (_randn(shape, generator) * factors for _ in range(2))
    deviation = factors.pow(4).sum(dim=-1, keepdim=True).sqrt() * shape[-1] ** -0.5
    return 3.0 * q / deviation, k, _randn(shape, generator)


def key_channel_outliers(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The same, but with those columns in k alone."""
    factors = _channels(shape, generator)
    q, k = _randn(shape, generator), _randn(shape, generator) * factors
    deviation = factors.pow(2).sum(dim=-1, keepdim=True).sqrt() * shape[-1] ** -0.5
    return 3.0 * q / deviation, k, _randn(shape, generator)


def offset_values(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """``N(0, 1)``, and v around 1: sums of its products grow with every key, and what sums drop with them."""
    q, k, v = (_randn(shape, generator) for _ in range(3))
    return q, k, v + 1.0


#: Name -> q, k and v of a shape (..., heads, head_dim), float32, on the generator's device.
DATA: dict[str, Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, Tensor, Tensor]]] = {
    "paper": paper_outliers,
    "offset": offset_values,
    "channels": channel_outliers,
    "key channels": key_channel_outliers,
}


def make_inputs(
    kind: str,
    shape: tuple[int, int, int, int],
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one shape (batch, seqlen, heads, head_dim); each kind of device draws other numbers.

    Raises:
        ValueError: ``kind`` is not a name of `DATA`.
    """
    if kind not in DATA:
        raise ValueError(f"kind={kind!r}: allowed are {', '.join(DATA)}")
    q, k, v = DATA[kind](shape, torch.Generator(device).manual_seed(seed))
    return q.to(dtype), k.to(dtype), v.to(dtype)


# Attention ----------------------------------------------------------------------------------------------------------


def _probabilities(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """``exp(score - row max)`` and their row sums, float64 (batch, heads, seqlen_q, seqlen_k)."""
    group = q.shape[2] // k.shape[2]
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2).repeat_interleave(group, dim=1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(scores.shape[-1] - scores.shape[-2]), -torch.inf)
    probabilities = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return probabilities, probabilities.sum(dim=-1, keepdim=True)


def _times_values(probabilities: Tensor, v: Tensor) -> Tensor:
    group = probabilities.shape[1] // v.shape[2]
    return (probabilities @ v.double().transpose(1, 2).repeat_interleave(group, dim=1)).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention in float64, (batch, seqlen_q, heads_q, head_dim_v). Every query must see a key."""
    probabilities, row_sum = _probabilities(q, k, causal)
    return _times_values(probabilities / row_sum, v)


def emulate(
    x: QuantizedQKV, causal: bool = False, round_probabilities: bool = True, queries: Tensor | None = None
) -> Tensor:
    """What a kernel with exact sums answers before it rounds out, float64 (batch, seqlen_q, heads_q, head_dim_v).

    Args:
        x: q, k and v in e4m3. Every query must see a key.
        causal: bottom-right aligned mask.
        round_probabilities: False leaves the error of q, k and v alone.
        queries: the answers of these alone, (count,) indices; without ``causal``.
    """
    q, k, v = x.dequantize()
    if queries is not None:
        q = q[:, queries]
    probabilities, row_sum = _probabilities(q, k, causal)
    if not round_probabilities:
        return _times_values(probabilities / row_sum, v)
    largest = x.v_scale if x.v_scale_max is None else x.v_scale_max
    values = x.v if x.v_layout == "row" else rows_of_transposed(x.v, x.seqlen_k)
    group = x.q.shape[2] // x.k.shape[2]
    share = torch.ones_like(probabilities[:, ::group, :1])
    if x.k_block:
        share *= (x.v_scale / largest[..., None]).repeat_interleave(x.k_block, dim=-1)[:, :, None, : x.seqlen_k]
    share = share.repeat_interleave(group, dim=1)
    rounded = to_e4m3((probabilities * share * P_SCALE).float()).double()
    out = _times_values(rounded / (rounded / share).sum(dim=-1, keepdim=True), values)
    return out * largest.double().repeat_interleave(group, dim=1)[:, None, :, None]


# Errors -------------------------------------------------------------------------------------------------------------


def rmse(x: Tensor, expected: Tensor) -> float:
    """Root of the mean squared difference."""
    return (x.double() - expected.double()).square().mean().sqrt().item()


def squared_errors(x: Tensor, expected: Tensor) -> Tensor:
    """Mean squared difference of each head: (heads,), float64, of (batch, seqlen, heads, head_dim)."""
    return (x.double() - expected.double()).square().mean(dim=(0, 1, 3))


def rmse_ratio(errors: Tensor, others: Tensor) -> tuple[float, float | None]:
    """Root mean squared error over that of another way, and the standard error of this ratio.

    Both ways have the same data, so that much of what is random cancels. The standard error is the jackknife's: from
    the ratios without one of the samples (Efron and Stein, The Annals of Statistics 9 (1981) 586).

    Args:
        errors, others: mean squared errors of the same independent samples, heads say; (samples,) float64. Ones as
            ``others`` give the error itself.

    Returns:
        The ratio, and its standard error; ``None`` of a single sample.
    """
    ratio = (errors.sum() / others.sum()).sqrt().item()
    count = errors.numel()
    if count == 1:
        return ratio, None
    without = ((errors.sum() - errors) / (others.sum() - others)).sqrt()
    return ratio, ((count - 1) * without.var(correction=0)).sqrt().item()


def errors(
    kind: str = "paper",
    shape: tuple[int, int, int, int] = (1, 1024, 4, 128),
    causal: bool = False,
    choices: dict[str, Choice] = CHOICES,
    seed: int = 0,
    round_probabilities: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """The error of each way to quantize: name -> root mean square, and ``"fp16"`` for inputs and out in 16 bits."""
    q, k, v = (x.to(device) for x in make_inputs(kind, shape, seed))
    expected = exact(q, k, v, causal)
    answers = {"fp16": rmse(expected.half(), expected)}
    for name, (block, incoherent, qk_dtype) in choices.items():
        x = quantize_qkv(
            quantize_tensor, q, k, v, seed=seed if incoherent else None, block=block or default_block(shape[3]),
            v_of_head=block is None, qk_dtype=qk_dtype,
        )  # fmt: skip
        answers[name] = rmse(emulate(x, causal, round_probabilities), expected)
    return answers
