"""The sweep behind the tile tables: every candidate tile of every class, at long, short and windowed shapes.

Each result row names the shape, the kernels from the fastest on with their times, and by how much the fastest leads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fa3.cli.timing import Sample, Sensors, burst, burst_calls, median, rounds
from fa3.options import Options
from fa3.plan import make_spec
from fa3.problem import DTYPE_NAMES
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


def tile_classes(head_dims: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """All tile classes, or those of some head dims of q and k. Raises ``ValueError`` for one that no class has."""
    known = sorted({head_dim for head_dim, _ in CANDIDATES})
    for head_dim in head_dims or ():
        if head_dim not in known:
            raise ValueError(f"--head-dims {head_dim}: those of the tile classes are {', '.join(map(str, known))}")
    return tuple(kind for kind in CANDIDATES if head_dims is None or kind[0] in head_dims)


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
    device: torch.device, dtype: torch.dtype, shapes: Iterable[Shape], sensors: Sensors
) -> Iterator[dict[str, Any]]:
    """Measure all candidates at some shapes: a row for each shape, as soon as it is measured."""
    from fa3.backends import hopper

    for shape in shapes:
        q, k = (torch.randn(shape.b, shape.s, shape.h, shape.d, device=device, dtype=dtype) for _ in range(2))
        v = torch.randn(shape.b, shape.s, shape.h, shape.dv, device=device, dtype=dtype)
        options = Options(WINDOW, 0) if shape.mask == "window" else None
        calls = {}
        for spec in candidates((shape.d, shape.dv), shape.mask, DTYPE_NAMES[dtype]):
            calls[spec.name] = lambda spec=spec, q=q, k=k, v=v, options=options: hopper.forward_with_spec(
                spec, q, k, v, options=options
            )
        samples: dict[str, list[Sample]] = {name: [] for name in calls}
        with torch.inference_mode():
            counts = {}
            for name, call in calls.items():
                burst(device, [call], 2)
                counts[name] = burst_calls(burst(device, [call], 3).ms)
            names = list(calls)
            for index in rounds(ROUNDS, len(names)):
                name = names[index]
                samples[name].append(burst(device, [calls[name]], counts[name], sensors))
        yield {**asdict(shape), "dtype": DTYPE_NAMES[dtype], **_ranked(samples)}


def _ranked(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """What a row says of the kernels of a shape: the fastest first."""
    ranking = sorted((median(taken).ms * 1e3, name) for name, taken in samples.items())
    return {
        "clock_mhz": median([sample for taken in samples.values() for sample in taken]).clock_mhz,
        "microseconds": {name: round(time, 2) for time, name in ranking},
        "fastest": ranking[0][1],
        "runner_up": ranking[1][1] if len(ranking) > 1 else None,
        "margin": round(ranking[1][0] / ranking[0][0] - 1, 4) if len(ranking) > 1 else None,
    }


def describe(row: dict[str, Any]) -> str:
    """One line: the shape, and the times of all tiles, the fastest first."""
    dims = f"d {row['d']}" if row["d"] == row["dv"] else f"d {row['d']}, dv {row['dv']}"
    # forward_bf16_d64_full_256x64x4_wpot8: the tiles are the last part but one.
    times = "  ".join(f"{name.split('_')[-2]} {us:.1f}" for name, us in row["microseconds"].items())
    return f"({row['b']}, {row['s']}, {row['h']}, {dims}) {row['mask']}: {times} us"
