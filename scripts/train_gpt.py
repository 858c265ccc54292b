"""Train a small GPT with fa3, with plain attention, or with the fastest of PyTorch's, and compare the losses.

    python scripts/train_gpt.py --attention fa3     one run; also math and best
    python scripts/train_gpt.py --compare           all of them in turn, and a file in benchmarks/results
    python scripts/train_gpt.py --compare --tiny    the same in seconds, on a CPU too

Same seeds, initial weights and data for all. ``math`` is SDPA's math backend, which makes the N x N scores in float32:
two sequences of 4096 tokens are what it has memory and time for, so the batch is 2. ``best`` is the fastest of SDPA's
other backends. Weights are float32, products bf16 by autocast. On a GPU the steps from the second window on are
one CUDA graph each: for a model as small as this one the host takes longer than the GPU, whatever the attention.

How near the curves must be: runs that differ in rounding alone drift apart, and by how much depends on model and data.
It is measured here in two ways. ``best-split`` is ``best`` with the batch in two halves, whose gradients are added:
another order of the sums and nothing else. And ``best`` differs from ``math`` by the rounding of a fused kernel.
Losses are averaged over windows of steps; the largest difference of fa3 from math must be at most twice the larger of
these two, or below 1e-4, which is a difference in float32 too.

The data is a Markov chain in which a token depends on the two before it. What can be said from the last one alone is
learned soon, without attention; the rest needs attention to the one before.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
from fa3.cli.bench import facts
from fa3.cli.files import check_output
from fa3.cli.timing import Sensors, synchronize

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
#: (q, k, v) of shape (batch, seqlen, heads, head_dim) -> causal attention of the same shape.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FUSED = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


@dataclass(frozen=True)
class Config:
    """Model, data and training; losses are compared over windows of ``window`` steps."""

    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    seqlen: int = 4096
    vocabulary: int = 16
    batch: int = 2
    steps: int = 200
    window: int = 20
    warm_up: int = 20
    learning_rate: float = 6e-4
    seed: int = 0


TINY = Config(
    layers=2, heads=2, head_dim=16, seqlen=64, vocabulary=8, steps=24, window=4, warm_up=4, learning_rate=3e-3
)


def markov_chain(config: Config) -> Tensor:
    """Tokens (steps, batch, seqlen + 1) of a random chain in which a token depends on the two before it."""
    chance, size = torch.Generator().manual_seed(config.seed + 1), config.vocabulary
    sequences = config.steps * config.batch
    last, before_last = (2.0 * torch.randn(*shape, size, generator=chance) for shape in ((1, size), (size, 1)))
    limits = (last + before_last).softmax(-1).cumsum(-1)
    tokens = torch.randint(size, (sequences, config.seqlen + 1), generator=chance)
    draws = torch.rand(config.seqlen + 1, sequences, 1, generator=chance)
    for i in range(2, config.seqlen + 1):
        tokens[:, i] = (draws[i] > limits[tokens[:, i - 2], tokens[:, i - 1]]).sum(-1).clamp(max=size - 1)
    return tokens.view(config.steps, config.batch, -1)


def rotated(x: Tensor) -> Tensor:
    """x (batch, seqlen, heads, head_dim), each pair of columns turned by the position (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * frequency)[:, None]
    (first, second), sine, cosine = x.float().chunk(2, dim=-1), angle.sin(), angle.cos()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        hidden = config.heads * config.head_dim
        self.attend, self.heads = attend, config.heads
        self.norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(rotated(q), rotated(k), v).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (batch, seqlen) and the next ones -> mean cross-entropy."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        hidden = config.heads * config.head_dim
        self.embedding = nn.Embedding(config.vocabulary, hidden)
        self.blocks = nn.Sequential(*(Block(config, attend) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, config.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.layers) if into_residual else 1.0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def sdpa(backend: str) -> Attend:
    """Attention by one of SDPA's backends, whose layout is (batch, heads, seqlen, head_dim)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


def fastest(config: Config, device: torch.device) -> str:
    """Name of the fused backend of SDPA that does forward and backward in the least time here."""
    shape = (config.batch, config.seqlen, config.heads, config.head_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    times = {}
    for name, backend in FUSED.items():
        with suppress(RuntimeError):  # not one for this device or shape
            for count in (3, 10):  # the first calls load and choose kernels
                synchronize(device)
                begin = time.perf_counter()
                for _ in range(count):
                    torch.autograd.grad(sdpa(backend)(q, k, v), (q, k, v), torch.ones_like(q))
                synchronize(device)
                times[name] = (time.perf_counter() - begin) / count
    return min(times, key=lambda name: times[name])


def captured(learn: Callable[[Tensor], Tensor], example: Tensor) -> Callable[[Tensor], Tensor]:
    """``learn`` as one CUDA graph, which the host starts in no time; captured on the current stream."""
    graph, tokens = torch.cuda.CUDAGraph(), example.clone()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = learn(tokens)

    def replay(batch: Tensor) -> Tensor:
        tokens.copy_(batch)
        graph.replay()
        return loss.clone()

    return replay


def train(name: str, config: Config, data: Tensor, device: torch.device) -> dict[str, Any]:
    """One run: a row of the result file."""
    on_gpu, implementation = device.type == "cuda", name if name in ("fa3", "math") else fastest(config, device)
    attend = {"fa3": lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True), "math": sdpa("MATH")}.get(name)
    torch.manual_seed(config.seed)
    model = GPT(config, attend or sdpa(FUSED[implementation])).to(device)  # type: ignore[arg-type]
    # In a tensor, so that a graph can read it.
    rate = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), fused=on_gpu, capturable=on_gpu)
    parts = 2 if name == "best-split" else 1

    def learn(tokens: Tensor) -> Tensor:
        """One step; the loss of the batch."""
        total = torch.zeros((), device=device)
        for part in tokens.chunk(parts):
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = model(part[:, :-1], part[:, 1:]) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    losses, marks, replay = [], [], None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        for step, tokens in enumerate(data.to(device)):
            progress = max(0.0, (step - config.warm_up) / (config.steps - config.warm_up))
            scale = min(1.0, (step + 1) / config.warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
            if on_gpu:
                rate.fill_(scale * config.learning_rate)  # type: ignore[union-attr]
            else:
                optimizer.param_groups[0]["lr"] = scale * config.learning_rate
            if replay is None:
                losses.append(learn(tokens))
                optimizer.zero_grad()
            else:
                losses.append(replay(tokens))
            if (step + 1) % config.window == 0:  # the host waits for nothing in between
                synchronize(device)
                marks.append(time.perf_counter())
                if on_gpu and replay is None:
                    replay = captured(learn, tokens)
                    marks[-1] = time.perf_counter()
    synchronize(device)
    # From the end of the first window on: its steps load kernels and find out how much memory is needed.
    step_ms = 1e3 / config.window * statistics.median(end - begin for begin, end in itertools.pairwise(marks))
    return {
        "impl": name,
        "attention": implementation,
        "step_ms": round(step_ms, 3),
        "tokens_per_second": round(config.batch * config.seqlen / step_ms * 1e3),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "loss": [round(loss.item(), 5) for loss in losses],
    }


def difference(one: Sequence[float], other: Sequence[float], window: int) -> float:
    """Largest difference of two curves that are averaged over windows of steps; nan if either has one."""
    windows = [slice(first, first + window) for first in range(0, len(one), window)]
    apart = [abs(statistics.fmean(one[part]) - statistics.fmean(other[part])) for part in windows]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def agreement(rows: Sequence[dict[str, Any]], window: int) -> dict[str, Any]:
    """How near the curves are, and whether that of fa3 is as near to that of math as the module's text asks for."""
    loss = {row["impl"]: row["loss"] for row in rows}
    pairs = {"fa3-math": ("fa3", "math"), "best-math": ("best", "math"), "split-best": ("best-split", "best")}
    apart = {name: round(difference(loss[x], loss[y], window), 6) for name, (x, y) in pairs.items()}
    bound = max(2 * apart["best-math"], 2 * apart["split-best"], 1e-4)
    return {**apart, "window": window, "bound": bound, "agrees": apart["fa3-math"] <= bound}


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0, or 1 when the curves are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--attention", choices=("fa3", "math", "best"), default="fa3", help="one run (default: fa3)")
    what.add_argument("--compare", action="store_true", help="all, and whether their losses agree")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--commit", help="commit of the sources, for a copy of them without their repository")
    parser.add_argument("--json", type=Path, help="result file (default with --compare: benchmarks/results/...)")
    args = parser.parse_args(argv)
    path = args.json or (RESULTS / f"train-gpt-{datetime.date.today()}.json" if args.compare else None)
    if path is not None:
        check_output("--json", path)
    config, device = TINY if args.tiny else Config(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {"kind": "training", **facts(device, Sensors(device), [], {}, args.commit), "config": asdict(config)}
    result["command"] = "python scripts/train_gpt.py " + " ".join(Path(x).name for x in argv or sys.argv[1:])
    data = markov_chain(config)
    for name in ("fa3", "math", "best", "best-split") if args.compare else (args.attention,):
        row = train(name, config, data, device)
        result["rows"].append(row)
        final = statistics.fmean(row["loss"][-config.window :])
        print(f"{name} ({row['attention']}): loss {final:.4f}, {row['step_ms']:.2f} ms a step", flush=True)
    if args.compare:
        result["agreement"] = agreement(result["rows"], config.window)
        print(*(f"{name}: {value}" for name, value in result["agreement"].items()), sep=", ")
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}")
    return 0 if not args.compare or result["agreement"]["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
