"""Speed of gradients: a forward of any implementation made into its backward, the project's goals, and a short table.

Every implementation is asked for its gradients in the same way, ``torch.autograd.grad``, so that what the host spends
is the same for all. Of the direction ``bwd`` the forward is done once, outside of what is timed, and its graph kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa3.cli.roofline import utilisation

if TYPE_CHECKING:
    from rich.table import Table

    from fa3.cli.peers import Call, Prepare

Row = dict[str, Any]

#: Direction -> FLOPs in those of one forward, where head_dim == head_dim_v: two products forward, five backward.
DIRECTIONS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}

#: fa3's own rows; all others are peers.
OURS = ("fa3", "fa3-det", "tiled")

#: Largest difference of gradients from the first implementation's, relative and in the norm over a tensor: several
#: times what rounding P, dS and the result to bf16 leaves.
AGREEMENT = 0.02

GOAL_SEQLENS = (1024, 4096, 16384)
#: (head dim, causal) -> the goal of the backward's speed, in that of cuDNN, at the sequence lengths above: the best of
#: the other implementations on an H200, bf16, 16k tokens, heads times head dim 2048.
GOALS = {
    (64, False): (1.21, 1.19, 1.19),
    (64, True): (1.29, 1.20, 1.20),
    (128, False): (1.07, 1.02, 1.13),
    (128, True): (1.15, 1.12, 1.10),
    (256, False): (1.17, 1.13, 1.26),
    (256, True): (1.07, 1.14, 1.18),
}


@dataclass(frozen=True)
class GqaShape:
    """Batch, length, heads and K/V heads of ``--gqa``; head dim 128."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    causal: bool


GQA_HEAD_DIM = 128
GQA_SHAPES = tuple(
    GqaShape(batch, seqlen, heads, heads_kv, causal)
    for heads, heads_kv in ((32, 8), (16, 1))
    for batch, seqlen, causal in ((8, 2048, True), (1, 16384, False), (1, 16384, True))
)


def differentiated(prepare: Prepare, direction: str, heads_first: bool) -> Prepare:
    """Prepare of a call that returns (dq, dk, dv), each of the shape of its input, or that does the forward too.

    ``prepare`` binds a forward through which autograd can go. With ``heads_first`` its output is
    (batch, heads, seqlen, dim), a view or not, and gets its gradient as the same view of (batch, seqlen, heads, dim).
    """

    def bind(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        attend = prepare(q, k, v, causal)
        generator = torch.Generator(q.device).manual_seed(1)
        shape = (*q.shape[:3], v.shape[3])
        dout = torch.randn(shape, generator=generator, device=q.device, dtype=q.dtype)
        if heads_first:
            dout = dout.transpose(1, 2)
        if direction == "fwd+bwd":
            return lambda: torch.autograd.grad(output_of(attend()), leaves, dout)
        out = output_of(attend())
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return bind


def output_of(answer: object) -> Tensor:
    """The output of a forward that may return the LSE beside it."""
    out = answer[0] if isinstance(answer, (tuple, list)) else answer
    assert isinstance(out, Tensor)
    return out


@contextlib.contextmanager
def forced_backend(name: str) -> Iterator[None]:
    """``FA3_BACKEND=name`` for a while."""
    before = os.environ.get("FA3_BACKEND")
    os.environ["FA3_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["FA3_BACKEND"]
        else:
            os.environ["FA3_BACKEND"] = before


def disagreement(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Which gradient differs most from the expected ones, and by how much; ``None`` if all are near enough."""
    far: dict[str, float] = {}
    for name, gradient, right in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        far[name] = ((gradient.float() - right.float()).norm() / right.float().norm()).item()
        if far[name] != far[name]:
            return f"{name}: nan"
    name = max(far, key=lambda each: far[each])
    return None if far[name] <= AGREEMENT else f"{name}: {far[name]:.4f} of its norm"


def goal_of(entry: Row) -> float | None:
    """The goal for the cell of a row, as a multiple of cuDNN's speed; ``None`` where there is none."""
    goals = GOALS.get((entry["d"], entry["causal"]))
    usual = entry["direction"] == "bwd" and entry["dtype"] == "bf16" and entry["h"] == entry["hk"]
    usual = usual and entry["b"] * entry["s"] == 16384 and entry["h"] * entry["d"] == 2048
    if goals is None or not usual or entry["s"] not in GOAL_SEQLENS:
        return None
    return goals[GOAL_SEQLENS.index(entry["s"])]


def add_ratios(rows: Sequence[Row]) -> None:
    """Note in fa3's rows of one cell how fast they are in the speed of cuDNN and of the best peer, and the goal."""
    for entry in rows:
        if entry["impl"] not in OURS:
            continue
        peers = {each["impl"]: each["ms"] for each in rows if each["regime"] == entry["regime"]}
        for name in OURS:
            peers.pop(name, None)
        entry["to_cudnn"] = round(peers["cudnn"] / entry["ms"], 3) if "cudnn" in peers else None
        entry["to_best_peer"] = round(min(peers.values()) / entry["ms"], 3) if peers else None
        if entry["impl"] == "fa3":
            entry["goal"] = goal_of(entry)


def verdict(entry: Row) -> str:
    """``met`` or ``missed``, or nothing where there is no goal, or no cuDNN to compare with."""
    if entry.get("goal") is None or entry.get("to_cudnn") is None:
        return ""
    return "met" if entry["to_cudnn"] >= entry["goal"] else "missed"


def short_tables(result: Row) -> Iterator[Table]:
    """A table for each regime, a line for each cell: everybody's TFLOPS, and fa3's ratios, clock and power."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    impls = list(result["impls"])
    for regime in ("burst", "steady"):
        cells: dict[tuple[Any, ...], dict[str, Row]] = {}
        for entry in result["rows"]:
            if entry["regime"] == regime:
                place = tuple(entry[field] for field in ("dtype", "d", "causal", "b", "s", "h", "hk"))
                cells.setdefault(place, {})[entry["impl"]] = entry
        if not cells:
            continue
        title = f"{result['gpu'] or 'CPU'}, {result['rows'][0]['direction']}, {regime}, TFLOPS"
        table = Table("cell", title=title, box=SIMPLE_HEAD)
        lines = [_line(place, cell, impls, result["sm_count"]) for place, cell in cells.items()]
        # What this machine does not tell is no column.
        told = [name for name in lines[0] if any(line[name] for line in lines)]
        for name in told[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*(line[name] for name in told))
        yield table


def _line(place: tuple[Any, ...], cell: dict[str, Row], impls: Sequence[str], sm_count: int | None) -> dict[str, str]:
    """Column -> text of one cell."""
    dtype, d, causal, b, s, h, hk = place
    heads = "" if h == hk else f" {h}/{hk} heads"
    line = {"cell": f"{dtype} {d}-{'causal' if causal else 'full'}-{s} x {b}{heads}"}
    for impl in impls:
        speed = cell[impl]["tflops"] if impl in cell else None
        line[impl] = "" if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.3f}"
    ours = cell.get("fa3", {})

    def told(field: str, form: str) -> str:
        return "" if ours.get(field) is None else format(ours[field], form)

    line |= {
        "/ cudnn": told("to_cudnn", ".3f"),
        "goal": told("goal", ".2f"),
        "": verdict(ours) if ours else "",
        "/ best": told("to_best_peer", ".3f"),
        "MHz": told("clock_mhz", ".0f"),
        "utilisation": "",
        "W": told("watts", ".0f"),
    }
    if ours.get("clock_mhz") and sm_count:
        line["utilisation"] = f"{utilisation(ours['tflops'], sm_count, ours['clock_mhz']):.3f}"
    return line
