"""The error of attention in e4m3 against float64, by how q, k and v are quantized: the experiment of the paper.

Entries of q, k and v have outliers; see `fa3.numerics.fp8_error`, which also emulates e4m3 attention with exact sums.
q, k and v are bf16 numbers, the same for all; the reference is float64 attention of them, of a random subset of the
queries, so that long rows take seconds. Errors are root mean squares over those queries, all columns, all heads and
several seeds. In parentheses: the error of a kernel, over that of the same e4m3 tensors with exact sums.

A few queries that one or two keys rule are most of such an error, so it is known to some percent only. Ratios are of
errors on the same data, and each has a standard error: heads of all seeds are the samples, and each is left out once
(the jackknife).

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
from fa3.numerics.fp8_error import CHOICES, emulate, exact, make_inputs, rmse_ratio, squared_errors
from fa3.quantization import QuantizedQKV, rope_rows
from fa3.spec import INT8

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
HEADS = 8
QUERIES = 1024
SEED = 0
#: Seeds from the first on: of rows up to `FEW_SEEDS_FROM`, of longer ones, and on a CPU.
SEEDS, FEW_SEEDS, CPU_SEEDS = 16, 8, 1
FEW_SEEDS_FROM = 16384
TIME_LIMIT = 240.0

#: Scores of a chunk of queries that are held at a time: 2 GB in float64, of which the emulation has a few.
CHUNK_SCORES = 2**28


@dataclass(frozen=True)
class Case:
    """One experiment, for each of several seeds: batch 1, as many queries as keys, no mask."""

    data: str
    head_dim: int
    seqlen: int
    heads: int
    queries: int
    seed: int
    seeds: int = 1

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
    parser.add_argument("--seed", type=int, default=SEED, help=f"first, of data, queries and signs (default: {SEED})")
    parser.add_argument(
        "--seeds", type=int, help=f"how many (default: {SEEDS}, of long rows {FEW_SEEDS}, on a CPU {CPU_SEEDS})"
    )
    parser.add_argument("--limit", type=seconds, default=TIME_LIMIT, help="seconds after which no new case begins")
    parser.add_argument("--commit", help="commit of the sources, for a copy of them without their repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")


def choose_cases(args: argparse.Namespace, on_gpu: bool) -> list[Case]:
    """The cases of a run, those to compare first in front. Raises ``ValueError`` for what is not allowed."""
    for name in ("heads", "queries", "seeds"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: must be at least 1")
    if not 0 <= args.seed <= 2**31 - (args.seeds or SEEDS):
        raise ValueError(f"--seed {args.seed}: must be from 0 to 2**31 - {args.seeds or SEEDS}, the number of seeds")
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
        Case(name, head_dim, seqlen, args.heads, args.queries, args.seed, args.seeds or _seeds(seqlen, on_gpu))
        for name, head_dim in itertools.product(names, head_dims)
        for seqlen in given or ((SEQLENS if name == "paper" else FEW_SEQLENS) if on_gpu else CPU_SEQLENS)
    ]


def _seeds(seqlen: int, on_gpu: bool) -> int:
    if not on_gpu:
        return CPU_SEEDS
    return SEEDS if seqlen <= FEW_SEEDS_FROM else FEW_SEEDS


# One case -----------------------------------------------------------------------------------------------------------


def _in_pieces(function: Callable[[int, Tensor], Tensor], heads: int, queries: Tensor, seqlen: int) -> Tensor:
    """``function(head, queries)`` of one head and a chunk of its queries at a time, so that few scores are held."""
    chunks = queries.split(max(1, CHUNK_SCORES // seqlen))
    return torch.cat([torch.cat([function(head, some) for some in chunks], dim=1) for head in range(heads)], dim=2)


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
    """The tensors of a case for its first seed, and the errors of what is computed of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        kind, with_rope = DATA[case.data]
        shape = (1, case.seqlen, case.heads, case.head_dim)
        self.case = case
        self.q, self.k, self.v = make_inputs(kind, shape, case.seed, torch.bfloat16, device)
        self.rope = rope_tables(case.seqlen, case.head_dim, device) if with_rope else None
        # On the CPU, so that it is the same subset everywhere.
        order = torch.randperm(case.seqlen, generator=torch.Generator().manual_seed(case.seed))
        self.queries = order[: case.queries].sort().values.to(device)
        self.expected = self._in_pieces(self._exact)

    def _in_pieces(self, function: Callable[[int, Tensor], Tensor]) -> Tensor:
        return _in_pieces(function, self.case.heads, self.queries, self.case.seqlen)

    def _exact(self, head: int, queries: Tensor) -> Tensor:
        one = slice(head, head + 1)
        q, k = self._embedded(self.q[:, :, one].double()), self._embedded(self.k[:, :, one].double())
        return exact(q[:, queries], k, self.v[:, :, one])

    def _embedded(self, x: Tensor) -> Tensor:
        return x if self.rope is None else rope_rows(x, self.rope)

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q and k after the rotary embedding, and v, in 16 bits."""
        return self._embedded(self.q).to(dtype), self._embedded(self.k).to(dtype), self.v.to(dtype)

    def quantized(self, choice: str) -> QuantizedQKV:
        """q, k and v as one of the `CHOICES` has them."""
        block, incoherent, qk_dtype = CHOICES[choice]
        return fa3.quantize_qkv(
            self.q,
            self.k,
            self.v,
            rope=self.rope,
            incoherent=incoherent,
            seed=self.case.seed,
            block=block,
            qk_dtype=qk_dtype,
            # Peers take whole heads, and read v in rows.
            v_layout="row" if block else "transposed",
        )

    def errors(self, out: Tensor) -> Tensor:
        """Mean squared error of each head over the queries that are compared; ``out`` has them, or all."""
        if out.shape[1] != self.expected.shape[1]:
            out = out[:, self.queries]
        return squared_errors(out, self.expected)

    def exact_sums(self, x: QuantizedQKV) -> Tensor:
        """The errors of e4m3 tensors where nothing is rounded but probabilities."""
        of_heads = [_of_head(x, head) for head in range(self.case.heads)]
        return self.errors(self._in_pieces(lambda head, queries: emulate(of_heads[head], queries=queries)))


def _quantized_calls(
    x: QuantizedQKV, choice: str, official: Callable[..., object] | None
) -> Iterator[tuple[Line, Callable[[], object]]]:
    """Every kernel that takes these tensors."""
    for two_level in (False, True):
        yield Line("fa3", "e4m3", choice, two_level), partial(fa3.flash_attn_quantized_func, x, two_level=two_level)
    if official is not None and choice.startswith("tensor"):
        scales = {"q_descale": x.q_scale, "k_descale": x.k_scale, "v_descale": x.v_scale}
        yield Line("official", "e4m3", choice), partial(official, x.q, x.k, x.v, **scales)


def _of_eager(experiment: Experiment, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return experiment.errors(eager(q[:, experiment.queries], k, v))


def _of_16_bits(experiment: Experiment, dtype: torch.dtype) -> Tensor:
    return experiment.errors(_tensor_of(fa3.flash_attn_func(*experiment.rounded(dtype))))


def _errors_of(experiment: Experiment, call: Callable[[], object]) -> Tensor:
    return experiment.errors(_tensor_of(call()))


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
    # Of each line the errors of every head, seed by seed.
    errors: dict[Line, list[Tensor]] = {}
    failed: dict[Line, str] = {}

    def add(line: Line, call: Callable[[], Tensor]) -> None:
        if line in failed:
            return
        try:
            errors.setdefault(line, []).append(call())
        except Exception as failure:  # a kernel may not be there, and a peer may fail in any way
            first_line = (str(failure).strip().splitlines() or [""])[0]
            failed[line] = f"{line.label}: {type(failure).__name__}: {first_line}"

    for seed in range(case.seed, case.seed + case.seeds):
        experiment = Experiment(replace(case, seed=seed), device)
        q, k, v = experiment.rounded(torch.float16)
        add(Line("eager", "fp16"), partial(_of_eager, experiment, q, k, v))
        if kernels:
            for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
                add(Line("fa3", name), partial(_of_16_bits, experiment, dtype))
        for choice in CHOICES:
            x = experiment.quantized(choice)
            if kernels:
                for line, call in _quantized_calls(x, choice, official):
                    add(line, partial(_errors_of, experiment, call))
            add(Line("exact sums", "e4m3", choice), partial(experiment.exact_sums, x))
    for failure in failed.values():
        measured.failed.setdefault(failure, []).append(str(case))
    found = {line: torch.cat(of_seeds) for line, of_seeds in errors.items() if line not in failed and of_seeds}
    measured.rows += [_row(case, line, found) for line in found]


def _row(case: Case, line: Line, found: dict[Line, Tensor]) -> Row:
    """One row of a result file: ``found`` has the errors of every head of every seed, for all lines of the case."""
    scales, *more = line.choice.split(", ")
    incoherent = "incoherent" in more
    errors = found[line]
    rmse, rmse_error = rmse_ratio(errors, torch.ones_like(errors))
    # Of kernels in e4m3, beside exact sums of the same tensors; of fa3's, beside the official one's that has the same
    # q and k, rotated or not, but one scale for all of each tensor.
    of_kernel = line.dtype == "e4m3" and line.impl != "exact sums"
    exact_sums = found.get(Line("exact sums", "e4m3", line.choice)) if of_kernel else None
    beside = Line("official", "e4m3", "tensor, incoherent" if incoherent else "tensor")
    official = found.get(beside) if of_kernel else None
    to_exact, _ = (None, None) if exact_sums is None else rmse_ratio(errors, exact_sums)
    to_official, to_official_error = (
        (None, None) if official is None or line.impl == "official" else rmse_ratio(errors, official)
    )
    return {
        "data": case.data,
        "d": case.head_dim,
        "s": case.seqlen,
        "b": 1,
        "h": case.heads,
        "queries": min(case.queries, case.seqlen),
        "seeds": case.seeds,
        "impl": line.impl,
        "dtype": line.dtype,
        "scales": scales,
        "incoherent": incoherent,
        "qk_dtype": INT8 if INT8 in more else line.dtype,
        "two_level": line.two_level,
        "rmse": _digits(rmse),
        "rmse_error": _digits(rmse_error),
        "to_exact_sums": _places(to_exact),
        "to_official": _places(to_official),
        "to_official_error": _places(to_official_error),
    }


def _digits(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def _places(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


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


def official_table(rows: list[Row]) -> Table | None:
    """Errors of fa3 over those of the official kernel, of the paper's data, rotated; None without such rows."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    group = beside_official(rows)
    if not group:
        return None
    table = Table(title="fa3 / official, both rotated, paper (standard error)", box=SIMPLE_HEAD)
    for name in ("", "head dim", *map(str, sorted({row["s"] for row in group}))):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, head_dim in dict.fromkeys((label_of(row), row["d"]) for row in group):
        found = {row["s"]: row for row in group if (label_of(row), row["d"]) == (label, head_dim)}
        texts = (ratio_text(found.get(seqlen)) for seqlen in sorted({row["s"] for row in group}))
        table.add_row(label, str(head_dim), *texts)
    return table


def beside_official(rows: list[Row]) -> list[Row]:
    """Rows of the paper's data with rotated q and k that have a ratio to the official kernel."""
    return [row for row in rows if row["data"] == "paper" and row["incoherent"] and row.get("to_official")]


def ratio_text(row: Row | None) -> str:
    """The ratio of a row to the official kernel, with its standard error."""
    if row is None:
        return ""
    error = row["to_official_error"]
    return f"{row['to_official']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def label_of(row: Row) -> str:
    """What the line of a row is called in a table."""
    choice = row["scales"] + (", incoherent" if row["incoherent"] else "")
    choice += f", {INT8}" if row.get("qk_dtype") == INT8 else ""
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
    beside = official_table(result["rows"])
    if beside is not None:
        console.print(beside)
    others = " and the next" if any(row["seeds"] > 1 for row in result["rows"]) else ""
    print(f"seed {result['seed']}{others}, of data, queries and signs; {result['seconds']} s")
    for note in result["notes"]:
        print(f"note: {note}")
    for name, reason in result["missing"].items():
        print(f"not measured: {name}: {reason}")
