"""Short, odd and windowed shapes, with the host's cost: what a model's forward pass sees of one call.

``gpu_us`` is the GPU's time of a call, its host's cost hidden. ``call_us`` is what a call in a row of calls takes when
nothing hides the host: the larger of both, as the GPU waits for Python at short shapes. A window is measured by fa3
alone, after the same shape without a mask: its ideal share of that time is its share of the (query, key) pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

import fa3
from fa3.cli.measure import enter
from fa3.cli.peers import Call, Impl, Prepare
from fa3.cli.timing import burst, burst_calls, rounds, synchronize
from fa3.options import Options
from fa3.plan import flops, visible_pairs
from fa3.problem import check_forward

ROUNDS = 7
#: Calls in a row for the time with the host.
CALLS = 30


@dataclass(frozen=True)
class OddShape:
    """Batch, length, heads, K/V heads, head dims, mask; ``window``: keys to the left of a causal window, 0 for none."""

    b: int
    s: int
    h: int
    hk: int
    d: int
    dv: int
    causal: bool
    window: int = 0

    def __str__(self) -> str:
        dims = f"d {self.d}" if self.d == self.dv else f"d {self.d}, dv {self.dv}"
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"({self.b}, {self.s}, {self.h}/{self.hk}, {dims}) {mask}"


SHAPES = (
    OddShape(1, 512, 16, 16, 128, 128, False),
    OddShape(64, 197, 12, 12, 64, 64, False),
    OddShape(8, 2048, 32, 8, 128, 128, True),
    OddShape(1, 32768, 24, 24, 128, 128, False),
    OddShape(2, 8192, 16, 16, 192, 128, True),
    OddShape(2, 8192, 16, 16, 192, 128, False),
    OddShape(2, 8192, 16, 16, 96, 96, True),
    OddShape(2, 8192, 16, 16, 96, 96, False),
    OddShape(2, 8192, 10, 10, 192, 192, True),
    OddShape(2, 8192, 10, 10, 192, 192, False),
    OddShape(1, 512, 16, 16, 64, 64, False),
    OddShape(1, 1024, 16, 16, 128, 128, True),
    OddShape(1, 2048, 16, 16, 128, 128, False),
    OddShape(1, 2048, 32, 32, 64, 64, False),
    OddShape(1, 512, 8, 8, 256, 256, False),
    OddShape(2, 100, 32, 8, 128, 128, True),
    OddShape(1, 16384, 32, 32, 64, 64, False),
    OddShape(1, 16384, 32, 32, 64, 64, True, 1024),
    OddShape(1, 16384, 16, 16, 128, 128, False),
    OddShape(1, 16384, 16, 16, 128, 128, True, 1024),
    OddShape(1, 16384, 8, 8, 256, 256, False),
    OddShape(1, 16384, 8, 8, 256, 256, True, 1024),
)


def measure_odd(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[OddShape], impls: Sequence[Impl], notes: list[str]
) -> Iterator[list[dict[str, Any]]]:
    """A list of rows for each shape that anybody can compute, a row for each implementation that can.

    ``notes`` gets whoever cannot, and outputs that differ from the first one's.
    """
    full_us: dict[tuple[int, ...], float] = {}
    for shape in shapes:
        q = torch.randn(shape.b, shape.s, shape.h, shape.d, device=device, dtype=dtype)
        k = torch.randn(shape.b, shape.s, shape.hk, shape.d, device=device, dtype=dtype)
        v = torch.randn(shape.b, shape.s, shape.hk, shape.dv, device=device, dtype=dtype)
        options = Options(shape.window) if shape.window else None
        problem = check_forward(q, k, v, causal=shape.causal, options=options)
        found = impls
        if shape.window:
            found = [replace(impl, prepare=_windowed(shape.window)) for impl in impls if impl.name == "fa3"]
        entrants = enter([(impl, None) for impl in found], shape, [(q, k, v)], device, notes)
        gpu: list[list[float]] = [[] for _ in entrants]
        host: list[list[float]] = [[] for _ in entrants]
        for index in rounds(ROUNDS, len(entrants)):
            entrant = entrants[index]
            count = burst_calls(entrant.ms)
            with entrant.impl.context():
                gpu[index].append(burst(device, entrant.calls, count).ms * 1e3)
                host[index].append(_in_a_row(device, entrant.calls[0], count if shape.s > 4096 else CALLS))
        rows: list[dict[str, Any]] = []
        for index, entrant in enumerate(entrants):
            gpu_us = statistics.median(gpu[index])
            row = {
                **asdict(shape),
                "dtype": problem.dtype,
                "impl": entrant.impl.name,
                "gpu_us": round(gpu_us, 2),
                "call_us": round(statistics.median(host[index]), 2),
                "tflops": round(flops(problem) / gpu_us / 1e6, 1),
            }
            place = (shape.b, shape.s, shape.h, shape.hk, shape.d, shape.dv)
            if entrant.impl.name == "fa3" and not shape.causal:
                full_us[place] = gpu_us
            if shape.window and place in full_us:
                ideal_us = full_us[place] * visible_pairs(problem) / (shape.s * shape.s)
                row["of_ideal_share"] = round(gpu_us / ideal_us, 3)
            rows.append(row)
        if rows:
            yield rows


def _windowed(window: int) -> Prepare:
    return lambda q, k, v, causal: lambda: fa3.flash_attn_func(q, k, v, causal=causal, window_size=(window, 0))


def _in_a_row(device: torch.device, call: Call, count: int) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6 / count


def describe(rows: list[dict[str, Any]]) -> str:
    """One line: the shape, the times of all implementations, with the host's after the slash, and fa3's lead."""
    shape = OddShape(**{field.name: rows[0][field.name] for field in fields(OddShape)})
    times = "  ".join(f"{row['impl']} {row['gpu_us']:.1f}/{row['call_us']:.1f}" for row in rows)
    ours = next((row for row in rows if row["impl"] == "fa3"), None)
    peers = [row for row in rows if row["impl"] != "fa3"]
    lead = share = ""
    if ours is not None and peers:
        lead = (
            f"  best peer / fa3: {min(row['gpu_us'] for row in peers) / ours['gpu_us']:.3f} of the GPU's time, "
            f"{min(row['call_us'] for row in peers) / ours['call_us']:.3f} with the host"
        )
    if ours is not None and "of_ideal_share" in ours:
        share = f"  {ours['of_ideal_share']:.3f} of the ideal share"
    return f"{shape}: {times} us{lead}{share}"
