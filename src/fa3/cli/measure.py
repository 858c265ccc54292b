"""Cells, and what it takes to measure one: inputs, implementations bound to them, rounds, rows of a result file."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import fa3
from fa3.cli import gradients
from fa3.cli.peers import HEADS_FIRST, Call, Impl
from fa3.cli.roofline import attention_flops
from fa3.cli.timing import Sample, Sensors, burst, burst_calls, host_us, median, rounds, steady, synchronize
from fa3.spec import ForwardSpec

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

#: Seconds of one steady run, its settling time included.
STEADY_SECONDS = 1.0
#: Largest difference from the first implementation's output that another may have; a bf16 output of random
#: inputs is rounded at 2^-9 of values that stay below 4.
AGREEMENT = 0.03

#: Host time is measured where the GPU has next to nothing to do.
HOST_SHAPE = (1, 128, 4, 128)
HOST_CALLS = 200
HOST_ROUNDS = 21

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One problem that is timed: ``batch`` sequences of ``seqlen`` tokens, heads of ``head_dim`` columns.

    ``group_size`` query heads share a K/V head.
    """

    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    group_size: int = 1

    @property
    def heads_kv(self) -> int:
        """K/V heads."""
        return self.heads // self.group_size

    @property
    def flops(self) -> float:
        """FLOPs of one forward."""
        return attention_flops(
            batch=self.batch,
            heads=self.heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            causal=self.causal,
        )

    def __str__(self) -> str:
        heads = "" if self.group_size == 1 else f" with {self.heads}/{self.heads_kv} heads"
        return f"{self.head_dim}-{'causal' if self.causal else 'full'}-{self.seqlen}{heads}"


def make_cell(head_dim: int, causal: bool, seqlen: int, tokens: int, hidden: int) -> Cell:
    """The cell of ``tokens`` in all, and of ``hidden`` columns over all heads."""
    return Cell(head_dim, causal, seqlen, max(1, tokens // seqlen), max(1, hidden // head_dim))


def inputs(cell: Cell, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Sets of random q, k, v, as many as it takes to be twice as large as the L2 cache, at most eight."""
    shapes = [(cell.batch, cell.seqlen, heads, cell.head_dim) for heads in (cell.heads, cell.heads_kv, cell.heads_kv)]
    size = sum(map(math.prod, shapes)) * dtype.itemsize
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    generator = torch.Generator(device).manual_seed(0)
    sets = max(1, min(8, math.ceil(2 * l2_bytes / size)))
    return [
        tuple(torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
        for _ in range(sets)
    ]


@dataclass(frozen=True)
class Entrant:
    """One implementation bound to the inputs of a cell; ``spec`` is set when one kernel was asked for by its spec."""

    impl: Impl
    calls: list[Call]
    ms: float
    spec: str | None = None


#: What `enter` compares answers by.
Differs = Callable[[Impl, Any, Any, Impl], str | None]


class Named(Protocol):
    """What `enter` asks of a cell, besides the name that notes call it by: its text."""

    @property
    def causal(self) -> bool: ...


def enter(
    impls: Sequence[tuple[Impl, str | None]],
    cell: Named,
    tensors: list[tuple[Tensor, ...]],
    device: torch.device,
    notes: list[str],
    differs: Differs | None = None,
) -> list[Entrant]:
    """Bind every implementation to the inputs, run it once, compare its answer with the first one's, and time it.

    ``differs`` says of an implementation, its answer, the first one's and who that is how the answer differs, or
    ``None``; by default outputs are as near as 16 bits are.
    """
    entrants: list[Entrant] = []
    expected: Any = None
    for impl, spec in impls:
        label = f"{impl.name} {spec}" if spec else impl.name
        try:
            with impl.context():
                calls = [impl.prepare(q, k, v, cell.causal) for q, k, v in tensors]
                out = calls[0]()
                synchronize(device)
                burst(device, calls, 2)
                ms = burst(device, calls, 3).ms
        except Exception as error:  # a peer may fail in any way; the others are still measured
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            notes.append(f"{cell}: {label} left out: {type(error).__name__}: {first_line}")
            continue
        if expected is None:
            expected = out
        problem = (differs or _disagreement)(impl, out, expected, entrants[0].impl if entrants else impl)
        if problem is not None:
            notes.append(f"{cell}: {label} differs from {entrants[0].impl.name if entrants else label}: {problem}")
        entrants.append(Entrant(impl, calls, ms, spec))
    return entrants


def _disagreement(impl: Impl, answer: Any, expected: Any, first: Impl) -> str | None:
    """How what ``impl`` returned differs from what ``first`` did; ``None`` if it is near enough."""
    if impl.direction != "fwd":
        return gradients.disagreement(answer, expected)
    out, right = _rows_first(impl, answer), _rows_first(first, expected)
    difference = (out.float() - right.float()).abs().max().item()
    return None if difference <= AGREEMENT else str(difference)


def _rows_first(impl: Impl, answer: Any) -> Tensor:
    """The output of a forward as (batch, seqlen, heads, dim)."""
    out = gradients.output_of(answer)
    return out.transpose(1, 2) if impl.name in HEADS_FIRST else out


def row(entrant: Entrant, cell: Cell, dtype: str, sample: Sample, regime: str) -> Row:
    """One row of a result file."""
    fields: Row = {
        "impl": entrant.impl.name,
        "direction": entrant.impl.direction,
        "dtype": dtype,
        "d": cell.head_dim,
        "dv": cell.head_dim,
        "causal": cell.causal,
        "b": cell.batch,
        "s": cell.seqlen,
        "h": cell.heads,
        "hk": cell.heads_kv,
        "ms": round(sample.ms, 5),
        "tflops": round(gradients.DIRECTIONS[entrant.impl.direction] * cell.flops / sample.ms / 1e9, 3),
        "clock_mhz": sample.clock_mhz,
        "watts": None if sample.watts is None else round(sample.watts, 1),
        "regime": regime,
    }
    if entrant.spec is not None:
        fields["spec"] = entrant.spec
    return fields


def measure_cell(
    entrants: Sequence[Entrant],
    cell: Cell,
    dtype: str,
    device: torch.device,
    sensors: Sensors,
    *,
    burst_rounds: int,
    steady_rounds: int,
) -> list[Row]:
    """Rows of one cell: a burst row for each entrant, and a steady row too when ``steady_rounds`` is not 0."""
    rows: list[Row] = []
    bursts: list[list[Sample]] = [[] for _ in entrants]
    for index in rounds(burst_rounds, len(entrants)):
        entrant = entrants[index]
        with entrant.impl.context():
            bursts[index].append(burst(device, entrant.calls, burst_calls(entrant.ms), sensors))
    rows += [
        row(entrant, cell, dtype, median(samples), "burst") for entrant, samples in zip(entrants, bursts, strict=True)
    ]
    if not steady_rounds:
        return rows
    runs: list[list[Sample]] = [[] for _ in entrants]
    for index in rounds(steady_rounds, len(entrants)):
        entrant = entrants[index]
        with entrant.impl.context():
            runs[index].append(steady(device, entrant.calls, entrant.ms, STEADY_SECONDS, sensors))
    rows += [
        row(entrant, cell, dtype, median(samples), "steady") for entrant, samples in zip(entrants, runs, strict=True)
    ]
    return rows


def warm_up(entrants: Sequence[Entrant], device: torch.device, seconds: float) -> None:
    """Run all entrants in turn for ``seconds``."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for entrant in entrants:
            with entrant.impl.context():
                entrant.calls[0]()
        synchronize(device)


def schedule_impls() -> list[tuple[Impl, str | None]]:
    """fa3's own kernel, once for every combination of the switches of the schedule."""
    from fa3.backends import hopper
    from fa3.presets import shipped_specs

    def prepare(spec: ForwardSpec) -> Callable[..., Call]:
        def bind(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
            if causal != spec.causal:
                raise ValueError(f"{spec.name} has causal={spec.causal}")
            softmax_scale = q.shape[-1] ** -0.5
            return lambda: hopper.forward_with_spec(spec, q, k, v, softmax_scale, return_lse=False)

        return bind

    return [
        (Impl("fa3", fa3.__version__, prepare(spec)), spec.name)
        for spec in shipped_specs("schedule")
        if isinstance(spec, ForwardSpec)
        and spec.dtype == "fp16"
        and spec.head_dim == 128
        and spec.mask == "full"
        and spec.rescale_threshold
    ]


def measure_host(impls: Sequence[Impl], dtype: str, device: torch.device, notes: list[str]) -> list[Row]:
    """Host time of one call for each implementation, in microseconds: rows of the regime ``host``."""
    batch, seqlen, heads, head_dim = HOST_SHAPE
    cell = Cell(head_dim, False, seqlen, batch, heads)
    tensors = inputs(cell, DTYPES[dtype], device)[:1]
    entrants = enter([(impl, None) for impl in impls], cell, tensors, device, notes)
    times: list[list[float]] = [[] for _ in entrants]
    for _, (index, entrant) in itertools.product(range(HOST_ROUNDS), enumerate(entrants)):
        with entrant.impl.context():
            times[index].append(host_us(device, entrant.calls[0], HOST_CALLS))
    rows = []
    for entrant, samples in zip(entrants, times, strict=True):
        fields = row(entrant, cell, dtype, Sample(ms=math.inf), "host")
        rows.append({**fields, "ms": None, "tflops": None, "host_us": round(statistics.median(samples), 2)})
    return rows
