"""Short, odd and windowed shapes, with the host's cost: what a model's forward pass sees of one call.

``gpu_us`` is the GPU's time of a call, its host's cost hidden. ``call_us`` is what a call in a row of calls takes when
nothing hides the host: the larger of both, as the GPU waits for Python at short shapes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import fa3
from fa3.cli.peers import Call, Impl
from fa3.cli.timing import burst, burst_calls, synchronize
from fa3.options import Options
from fa3.plan import visible_pairs
from fa3.problem import check_forward

ROUNDS = 7
#: Calls in a row for the time with the host.
CALLS = 30


@dataclass(frozen=True)
class OddShape:
    """``window``: keys to the left of a causal window, 0 for none."""

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


def measure_odd(device: torch.device, dtype: torch.dtype, impls: Sequence[Impl]) -> Iterator[list[dict[str, Any]]]:
    """One list of rows for each shape, a row for each implementation."""
    full_us: dict[tuple[int, int, int], float] = {}
    for shape in SHAPES:
        q = torch.randn(shape.b, shape.s, shape.h, shape.d, device=device, dtype=dtype)
        k = torch.randn(shape.b, shape.s, shape.hk, shape.d, device=device, dtype=dtype)
        v = torch.randn(shape.b, shape.s, shape.hk, shape.dv, device=device, dtype=dtype)
        options = Options(shape.window) if shape.window else None
        pairs = visible_pairs(check_forward(q, k, v, causal=shape.causal, options=options))
        rows: list[dict[str, Any]] = []
        calls: list[tuple[Impl, Call, int]] = []
        for impl in impls:
            if shape.window and impl.name != "fa3":
                continue
            call = _windowed(q, k, v, shape.window) if shape.window else impl.prepare(q, k, v, shape.causal)
            try:
                with impl.context():
                    burst(device, [call], 2)
                    count = burst_calls(burst(device, [call], 3).ms)
            except Exception:  # a peer may not take a shape; the others are still measured
                continue
            calls.append((impl, call, count))
        gpu: dict[str, list[float]] = {impl.name: [] for impl, _, _ in calls}
        host: dict[str, list[float]] = {impl.name: [] for impl, _, _ in calls}
        for _ in range(ROUNDS):
            for impl, call, count in calls:
                with impl.context():
                    gpu[impl.name].append(burst(device, [call], count).ms * 1e3)
                    host[impl.name].append(_in_a_row(device, call, count if shape.s > 4096 else CALLS))
        for impl, _, _ in calls:
            row = {**asdict(shape), "impl": impl.name}
            row["gpu_us"] = round(statistics.median(gpu[impl.name]), 2)
            row["call_us"] = round(statistics.median(host[impl.name]), 2)
            if impl.name == "fa3":
                place = shape.s, shape.h, shape.d
                if shape.window:
                    ideal = full_us[place] * pairs / (shape.s * shape.s)
                    row["of_ideal_share"] = round(row["gpu_us"] / ideal, 3)
                elif not shape.causal:
                    full_us[place] = row["gpu_us"]
            flops = 2.0 * shape.b * shape.h * pairs * (shape.d + shape.dv)
            row["tflops"] = round(flops / row["gpu_us"] / 1e6, 1)
            rows.append(row)
        yield rows


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Call:
    return lambda: fa3.flash_attn_func(q, k, v, causal=True, window_size=(window, 0))


def _in_a_row(device: torch.device, call: Call, count: int) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6 / count


def describe(rows: list[dict[str, Any]]) -> str:
    """One line: the shape, and the times of all implementations."""
    first = rows[0]
    shape = OddShape(**{name: first[name] for name in OddShape.__dataclass_fields__})
    times = "  ".join(f"{row['impl']} {row['gpu_us']:.1f}/{row['call_us']:.1f}" for row in rows)
    peers = [row for row in rows if row["impl"] != "fa3"]
    lead = ""
    if peers and first["impl"] == "fa3":
        lead = (
            f"  best peer / fa3: {min(row['gpu_us'] for row in peers) / first['gpu_us']:.3f} of the GPU's time, "
            f"{min(row['call_us'] for row in peers) / first['call_us']:.3f} with the host"
        )
    share = f"  {first['of_ideal_share']:.3f} of the ideal share" if "of_ideal_share" in first else ""
    return f"{shape}: {times} us{lead}{share}"
