"""The sweep behind the tile tables: every candidate tile of every class, at long, short and windowed shapes.

Each result row names the shape, the kernels from the fastest on with their times, and by how much the fastest leads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fa3.cli.timing import Sensors, burst, burst_calls
from fa3.options import Options
from fa3.plan import make_spec
from fa3.spec import ForwardSpec
from fa3.tiles import CANDIDATES

ROUNDS = 5
TOKENS, HIDDEN = 16384, 2048

#: Window of the windowed cells: keys to the left.
WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """One shape of the sweep; ``heads`` share no K/V heads."""

    d: int
    dv: int
    mask: str
    b: int
    s: int
    h: int


def shapes(kinds: tuple[tuple[int, int], ...]) -> Iterator[Shape]:
    """16k tokens in short and long sequences, one windowed sequence, and grids that do not fill the card."""
    for d, dv in kinds:
        heads = max(1, HIDDEN // d)
        for mask in ("full", "causal"):
            for seqlen in (1024, 4096, TOKENS):
                yield Shape(d, dv, mask, TOKENS // seqlen, seqlen, heads)
            for seqlen in (512, 1024, 2048):
                yield Shape(d, dv, mask, 1, seqlen, 16)
        yield Shape(d, dv, "window", 1, TOKENS, heads)


def candidates(kind: tuple[int, int], mask: str, dtype: str) -> list[ForwardSpec]:
    """The specs that are tried for a tile class."""
    return [make_spec(dtype, kind, mask, choice) for choice in CANDIDATES[kind]]


def sweep(
    device: torch.device, dtype: torch.dtype, name: str, kinds: tuple[tuple[int, int], ...], sensors: Sensors
) -> Iterator[dict[str, Any]]:
    """Measure all shapes of some tile classes; ``name`` is fa3's name of the dtype."""
    from fa3.backends import hopper

    for shape in shapes(kinds):
        q, k = (torch.randn(shape.b, shape.s, shape.h, shape.d, device=device, dtype=dtype) for _ in range(2))
        v = torch.randn(shape.b, shape.s, shape.h, shape.dv, device=device, dtype=dtype)
        options = Options(WINDOW, 0) if shape.mask == "window" else None
        times: dict[str, list[float]] = {}
        calls = {}
        for spec in candidates((shape.d, shape.dv), shape.mask, name):
            calls[spec.name] = lambda spec=spec, q=q, k=k, v=v, options=options: hopper.forward_with_spec(
                spec, q, k, v, options=options
            )
        with torch.inference_mode():
            counts = {}
            for spec_name, call in calls.items():
                burst(device, [call], 2)
                counts[spec_name] = burst_calls(burst(device, [call], 3).ms)
            for _ in range(ROUNDS):
                for spec_name, call in calls.items():
                    times.setdefault(spec_name, []).append(burst(device, [call], counts[spec_name]).ms * 1e3)
        ranking = sorted((statistics.median(samples), spec_name) for spec_name, samples in times.items())
        yield {
            **asdict(shape),
            "dtype": name,
            "clock_mhz": sensors.clock_mhz(),
            "microseconds": {spec_name: round(time, 2) for time, spec_name in ranking},
            "fastest": ranking[0][1],
            "runner_up": ranking[1][1] if len(ranking) > 1 else None,
            "margin": round(ranking[1][0] / ranking[0][0] - 1, 4) if len(ranking) > 1 else None,
        }
