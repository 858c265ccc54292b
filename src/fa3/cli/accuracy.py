"""The error of attention in e4m3 against float64, by how q, k and v are quantized: the experiment of the paper.

Entries of q, k and v have outliers; see `fa3.numerics.fp8_error`, which also emulates e4m3 attention with exact sums.
q, k and v are bf16 numbers, the same for all; the reference is float64 attention of them, of a random subset of the
queries, so that long rows take seconds. Errors are root mean squares over those queries, all heads and columns. In
parentheses: the error of a kernel, over that of the same e4m3 tensors with exact sums.

Data: paper: N(0, 1), and one entry of a thousand about 10 times as large; offset: N(0, 1), and v around 1; channels:
two columns of q and k 20 to 50 times as large; key-channels: of k alone; with -rope: before a rotary embedding.
Without a GPU there is no kernel, and the table holds the emulation. `fa3 compile --preset accuracy` before
a run leaves its seconds to the measurement.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fa3
from fa3.cli import bench, peers
from fa3.cli.files import check_output, write_result
from fa3.cli.fp8_speed import rope_tables
from fa3.cli.timing import Sensors, seconds
from fa3.numerics.fp8_error import CHOICES, emulate, exact, make_inputs
from fa3.quantization import QuantizedQKV, rope_rows

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]

#: Name -> kind of data, and whether a rotary embedding follows.
DATA = {
    "paper": ("paper", False),
    "offset": ("offset", False),
    "channels": ("channels", False),
    "channels-rope": ("channels", True),
    "key-channels": ("key channels", False),
    "key-channels-rope": ("key channels", True),
}
#: In this order, so that a run that is cut short has what is compared first.
HEAD_DIMS = (128, 64, 256)
#: Sequence lengths of the paper's data, and of the others.
SEQLENS = tuple(1024 << i for i in range(8))
FEW_SEQLENS = (1024, 8192, 32768)
CPU_SEQLENS = (256, 1024)
HEADS = 4
QUERIES = 256
SEED = 0
TIME_LIMIT = 100.0


@dataclass(frozen=True)
class Case:
    """One experiment: batch 1, as many queries as keys, no mask."""

    data: str
    head_dim: int
    seqlen: int
    heads: int
    queries: int
    seed: int

    def __str__(self) -> str:
        return f"{self.data} {self.head_dim}-{self.seqlen}"


@dataclass(frozen=True)
class Line:
    """One way to compute attention.

    Attributes:
        impl: ``eager`` (PyTorch, step by step), ``fa3``, ``official``, or ``exact sums`` (the emulation).
        dtype: of q, k and v.
        choice: with e4m3, how they are quantized: a name of `fa3.numerics.fp8_error.CHOICES`.
        two_level: partial outputs added in float32; ``None`` where there is no choice.
    """

    impl: str
    dtype: str
    choice: str = ""
    two_level: bool | None = None

    @property
    def label(self) -> str:
        """Its name in a table."""
        level = {None: "", False: ", one level", True: ", two levels"}[self.two_level]
        return f"{self.impl} {self.dtype}" + (f", {self.choice}" if self.choice else "") + level


@dataclass
class Measured:
    """What a run has found: rows of the result file, and what failed where."""

    rows: list[Row]
    failed: dict[str, list[str]] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 accuracy``."""
    parser.add_argument("--data", help=f"kinds of data, with commas (default: {','.join(DATA)})")
    parser.add_argument("--head-dims", help=f"head dims, with commas (default: {','.join(map(str, HEAD_DIMS))})")
    parser.add_argument("--seqlens", help="sequence lengths, with commas (default: 1k to 128k, on a CPU 256 and 1k)")
    parser.add_argument("--heads", type=int, default=HEADS, help=f"heads (default: {HEADS})")
    parser.add_argument("--queries", type=int, default=QUERIES, help=f"queries compared (default: {QUERIES})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of data, queries and signs (default: {SEED})")
    parser.add_argument("--limit", type=seconds, default=TIME_LIMIT, help="seconds after which no new case begins")
    parser.add_argument("--commit", help="commit of the sources, for a copy of them without their repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")


def choose_cases(args: argparse.Namespace, on_gpu: bool) -> list[Case]:
    """The cases of a run, those to compare first in front. Raises ``ValueError`` for what is not allowed."""
    for name in ("heads", "queries"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed {args.seed}: must be from 0 to 2**31 - 1")
    names = list(DATA) if args.data is None else args.data.split(",")
    for name in names:
        if name not in DATA:
            raise ValueError(f"--data {name!r}: allowed are {', '.join(DATA)}")
    head_dims = list(HEAD_DIMS if on_gpu else HEAD_DIMS[:2])
    if args.head_dims is not None:
        head_dims = bench.parse_integers("--head-dims", args.head_dims)
        for head_dim in head_dims:
            if head_dim % 16 or head_dim > 256:
                raise ValueError(f"--head-dims {head_dim}: allowed are the multiples of 16 up to 256")
    given = None if args.seqlens is None else bench.parse_integers("--seqlens", args.seqlens)
    return [
        Case(name, head_dim, seqlen, args.heads, args.queries, args.seed)
        for name, head_dim in itertools.product(names, head_dims)
        for seqlen in given or ((SEQLENS if name == "paper" else FEW_SEQLENS) if on_gpu else CPU_SEQLENS)
    ]


# One case -----------------------------------------------------------------------------------------------------------


def _by_head(function: Callable[[int], Tensor], heads: int) -> Tensor:
    """One head at a time, so that float64 scores of long rows stay below a gigabyte."""
    return torch.cat([function(head) for head in range(heads)], dim=2)


def _of_head(x: QuantizedQKV, head: int) -> QuantizedQKV:
    one = slice(head, head + 1)
    return replace(
        x,
        q=x.q[:, :, one],
        k=x.k[:, :, one],
        v=x.v[:, :, one] if x.v_layout == "row" else x.v[:, one],
        q_scale=x.q_scale[:, one],
        k_scale=x.k_scale[:, one],
        v_scale=x.v_scale[:, one],
        v_scale_max=None if x.v_scale_max is None else x.v_scale_max[:, one],
    )


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as PyTorch does it step by step, everything in the dtype of q; (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


class Experiment:
    """The tensors of a case, and the errors of what is computed of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        kind, with_rope = DATA[case.data]
        shape = (1, case.seqlen, case.heads, case.head_dim)
        self.case = case
        self.q, self.k, self.v = make_inputs(kind, shape, case.seed, torch.bfloat16, device)
        self.rope = rope_tables(case.seqlen, case.head_dim, device) if with_rope else None
        # On the CPU, so that it is the same subset everywhere.
        order = torch.randperm(case.seqlen, generator=torch.Generator().manual_seed(case.seed))
        self.queries = order[: case.queries].sort().values.to(device)
        q, k = self._embedded(self.q.double()), self._embedded(self.k.double())
        q = q[:, self.queries]
        self.expected = _by_head(
            lambda head: exact(q[:, :, head, None], k[:, :, head, None], self.v[:, :, head, None]), case.heads
        )

    def _embedded(self, x: Tensor) -> Tensor:
        return x if self.rope is None else rope_rows(x, self.rope)

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q and k after the rotary embedding, and v, in 16 bits."""
        return self._embedded(self.q).to(dtype), self._embedded(self.k).to(dtype), self.v.to(dtype)

    def quantized(self, choice: str) -> QuantizedQKV:
        """q, k and v as one of the `CHOICES` has them."""
        block, incoherent = CHOICES[choice]
        return fa3.quantize_qkv(
            self.q,
            self.k,
            self.v,
            rope=self.rope,
            incoherent=incoherent,
            seed=self.case.seed,
            block=block,
            # Peers take whole heads, and read v in rows.
            v_layout="row" if block else "transposed",
        )

    def error(self, out: Tensor) -> float:
        """Root mean square over the queries that are compared; ``out`` has them, or all."""
        if out.shape[1] != self.expected.shape[1]:
            out = out[:, self.queries]
        return (out.double() - self.expected).square().mean().sqrt().item()

    def exact_sums(self, x: QuantizedQKV) -> float:
        """The error of e4m3 tensors where nothing is rounded but probabilities."""
        return self.error(_by_head(lambda head: emulate(_of_head(x, head), queries=self.queries), self.case.heads))


def _quantized_calls(
    x: QuantizedQKV, choice: str, official: Callable[..., object] | None
) -> Iterator[tuple[Line, Callable[[], object]]]:
    """Every kernel that takes these tensors."""
    for two_level in (False, True):
        yield Line("fa3", "e4m3", choice, two_level), partial(fa3.flash_attn_quantized_func, x, two_level=two_level)
    if official is not None and choice.startswith("tensor"):
        scales = {"q_descale": x.q_scale, "k_descale": x.k_scale, "v_descale": x.v_scale}
        yield Line("official", "e4m3", choice), partial(official, x.q, x.k, x.v, **scales)


def _of_16_bits(experiment: Experiment, dtype: torch.dtype) -> float:
    return experiment.error(_tensor_of(fa3.flash_attn_func(*experiment.rounded(dtype))))


def _error_of(experiment: Experiment, call: Callable[[], object]) -> float:
    return experiment.error(_tensor_of(call()))


def _tensor_of(answer: object) -> Tensor:
    """Out of what a function answers with: that alone, or first of several."""
    out = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(out, Tensor):
        raise TypeError(f"the answer is a {type(out).__name__}, not a tensor")
    return out


def measure(
    case: Case,
    device: torch.device,
    official: Callable[..., object] | None,
    measured: Measured,
    kernels: bool,
) -> None:
    """Add the rows of one case: 16 bits in PyTorch and the emulation, and all ``kernels`` where there are some."""
    experiment = Experiment(case, device)

    def add(line: Line, call: Callable[[], float], exact_sums: float | None = None) -> None:
        try:
            error = call()
        except Exception as failure:  # a kernel may not be there, and a peer may fail in any way
            first_line = (str(failure).strip().splitlines() or [""])[0]
            measured.failed.setdefault(f"{line.label}: {type(failure).__name__}: {first_line}", []).append(str(case))
            return
        measured.rows.append(_row(case, line, error, exact_sums))

    q, k, v = experiment.rounded(torch.float16)
    add(Line("eager", "fp16"), lambda: experiment.error(eager(q[:, experiment.queries], k, v)))
    if kernels:
        for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
            add(Line("fa3", name), partial(_of_16_bits, experiment, dtype))
    for choice in CHOICES:
        x = experiment.quantized(choice)
        exact_sums = experiment.exact_sums(x)
        if kernels:
            for line, call in _quantized_calls(x, choice, official):
                add(line, partial(_error_of, experiment, call), exact_sums)
        measured.rows.append(_row(case, Line("exact sums", "e4m3", choice), exact_sums))


def _row(case: Case, line: Line, error: float, exact_sums: float | None = None) -> Row:
    """One row of a result file."""
    scales, _, incoherent = line.choice.partition(", ")
    return {
        "data": case.data,
        "d": case.head_dim,
        "s": case.seqlen,
        "b": 1,
        "h": case.heads,
        "queries": min(case.queries, case.seqlen),
        "impl": line.impl,
        "dtype": line.dtype,
        "scales": scales,
        "incoherent": bool(incoherent),
        "two_level": line.two_level,
        "rmse": float(f"{error:.4g}"),
        "to_exact_sums": None if exact_sums is None else round(error / exact_sums, 4),
    }


# The command --------------------------------------------------------------------------------------------------------


def tables(rows: list[Row], head: str) -> Iterator[Table]:
    """One for each kind of data and head dim: a line for each way to compute, a column for each sequence length."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for data, head_dim in dict.fromkeys((row["data"], row["d"]) for row in rows):
        group = [row for row in rows if (row["data"], row["d"]) == (data, head_dim)]
        seqlens = sorted({row["s"] for row in group})
        table = Table(title=f"{head}, {data}, head dim {head_dim}", box=SIMPLE_HEAD)
        table.add_column("", no_wrap=True)
        for seqlen in seqlens:
            table.add_column(str(seqlen), justify="right", no_wrap=True)
        for label in dict.fromkeys(map(label_of, group)):
            found = {row["s"]: row for row in group if label_of(row) == label}
            table.add_row(label, *(_text(found.get(seqlen)) for seqlen in seqlens))
        yield table


def label_of(row: Row) -> str:
    """What the line of a row is called in a table."""
    choice = row["scales"] + (", incoherent" if row["incoherent"] else "")
    return Line(row["impl"], row["dtype"], choice, row["two_level"]).label


def _text(row: Row | None) -> str:
    if row is None:
        return ""
    ratio = row["to_exact_sums"]
    return f"{row['rmse']:.2e}" + ("" if ratio is None else f" ({ratio:.2f})")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the file. Returns 0, or 1 where fa3 failed, or nothing was measured."""
    begin = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    cases = choose_cases(args, on_gpu)
    if args.json:
        check_output("--json", args.json)
    sensors = Sensors(device)
    impls, missing = peers.find(device, ("fa3", "official"))
    official = peers.official_function() if any(impl.name == "official" for impl in impls) else None
    result: Row = {"kind": "accuracy", **bench.facts(device, sensors, impls, missing, args.commit), "seed": args.seed}
    measured = Measured(result["rows"])
    with torch.inference_mode():
        for number, case in enumerate(cases):
            if time.perf_counter() - begin > args.limit:
                result["notes"].append(f"stopped after {args.limit:g} s: {len(cases) - number} cases not measured")
                break
            measure(case, device, official, measured, kernels=on_gpu)
            write_result(result, args.json)
    result["notes"] += [f"{failure} ({', '.join(where)})" for failure, where in measured.failed.items()]
    result["seconds"] = round(time.perf_counter() - begin, 1)
    write_result(result, args.json)
    _print(result)
    if args.json:
        print(f"wrote {args.json}")
    return 1 if not measured.rows or any(failure.startswith("fa3 ") for failure in measured.failed) else 0


def _print(result: Row) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 200  # a log file has no edge to wrap at
    print("Root mean square errors (over those of exact sums)")
    for table in tables(result["rows"], result["gpu"] or "CPU"):
        console.print(table)
    print(f"seed {result['seed']} of data, queries and signs; {result['seconds']} s")
    for note in result["notes"]:
        print(f"note: {note}")
    for name, reason in result["missing"].items():
        print(f"not measured: {name}: {reason}")
