"""Speed of attention on this machine: fa3 beside every peer that is installed, interleaved in one run.

After a warm-up of one second each cell is measured twice: in short bursts (the card is cool and its clock high) and
in steady state (the card sits at its power limit). Each round goes over all of
them in another order, so that a drift of the clock, and what a neighbour leaves of the power, hit all alike.
The figures are medians; inputs rotate so that the L2 cache does not keep them from call to call.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fa3
from fa3.cli import fp8_speed, gradients, odd, peers, plots, sweep
from fa3.cli.files import check_output, positive_integer, write_result
from fa3.cli.measure import (
    DTYPES,
    Cell,
    Row,
    enter,
    inputs,
    make_cell,
    measure_cell,
    measure_host,
    schedule_impls,
    warm_up,
)
from fa3.cli.peers import Impl
from fa3.cli.roofline import utilisation
from fa3.cli.timing import Sensors, seconds
from fa3.errors import FA3Error

if TYPE_CHECKING:
    from rich.table import Table

#: What the default cells hold in all: tokens, and heads times head dim.
TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
MASKS = ("full", "causal")

#: What is given with ``--cells`` or for the grid, and means nothing for shapes that are fixed.
SHAPE_OPTIONS = ("cells", "head_dims", "masks", "seqlens", "tokens", "hidden")
OF_THE_GRID = (*SHAPE_OPTIONS, "steady", "quick", "png")
STEADY = "16384"
#: Kinds of runs whose shapes are fixed, with those of the options above, or ``impls``, that they have a use for.
_USES: dict[str, tuple[str, ...]] = {"sweep": ("head_dims",), "odd": ("impls",), "fp8": ("quick",)}
#: Kinds of runs that do not ask for all peers.
_KERNELS_OF = {"sweep": ("fa3",), "fp8-speed": ("fa3", "official")}

#: Rounds of bursts, and of steady runs, that go over all implementations of a cell.
BURST_ROUNDS = 11
STEADY_ROUNDS = 2
WARM_UP_SECONDS = 1.0
#: Seconds after which a run takes no new cell. What was measured until then is kept.
TIME_LIMIT = 140.0


def parse_cells(text: str, tokens: int, hidden: int) -> list[Cell]:
    """Cells from ``D-MASK-SEQLEN,...``, e.g. ``128-full-16384,64-causal-4096``."""
    cells = []
    for item in text.split(","):
        parts = item.split("-")
        if len(parts) != 3 or parts[1] not in MASKS:
            raise ValueError(f"--cells {item!r}: expected D-MASK-SEQLEN with a mask of {MASKS}, e.g. 128-full-16384")
        head_dim, seqlen = positive_integer(parts[0]), positive_integer(parts[2])
        if head_dim is None or seqlen is None:
            raise ValueError(f"--cells {item!r}: head dim and sequence length must be integers from 1 to 2**31 - 1")
        cells.append(make_cell(head_dim, parts[1] == "causal", seqlen, tokens, hidden))
    return cells


def parse_integers(name: str, text: str) -> list[int]:
    """Positive integers from a comma-separated list."""
    numbers = []
    for item in text.split(","):
        number = positive_integer(item)
        if number is None:
            raise ValueError(f"{name} {text!r}: expected positive integers with commas between them")
        numbers.append(number)
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 bench``."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--ablation", action="store_true", help="the switches of the schedule, off and on, at one cell")
    kind.add_argument(
        "--sweep", action="store_true", help="all candidate tiles, for the tile tables; needs preset sweep"
    )
    kind.add_argument("--odd", action="store_true", help="short, odd and windowed shapes, with the host's cost")
    kind.add_argument(
        "--fp8", action="store_true", help="e4m3: attention beside the official kernel, quantization, and both"
    )
    kind.add_argument("--host", action="store_true", help="host time of a call, at a tiny shape")
    kind.add_argument(
        "--gqa", action="store_true", help="shapes whose query heads share K/V heads, in place of the grid"
    )
    parser.add_argument(
        "--direction", choices=tuple(gradients.DIRECTIONS), default="fwd",
        help="forward, gradients alone, or both in turn (default: fwd)",
    )  # fmt: skip
    parser.add_argument("--cells", help="D-MASK-SEQLEN,... instead of the grid, e.g. 128-full-16384,64-causal-4096")
    parser.add_argument("--head-dims", help="head dims of the grid, with commas")
    parser.add_argument("--masks", help="masks of the grid (default: full,causal)")
    parser.add_argument("--seqlens", help="sequence lengths of the grid, with commas")
    parser.add_argument("--tokens", type=int, help=f"tokens of a cell in all (default: {TOKENS}, on a CPU 2048)")
    parser.add_argument("--hidden", type=int, help=f"heads times head dim (default: {HIDDEN}, on a CPU 512)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="element type (default: bf16, on a CPU fp32)")
    parser.add_argument("--impls", help="implementations to measure, with commas (default: all found)")
    parser.add_argument(
        "--steady", help=f"sequence lengths also run in steady state, 'all' or 'none' (default: {STEADY})"
    )
    parser.add_argument("--quick", action="store_true", help="three rounds, no steady state: a first look")
    parser.add_argument("--limit", type=seconds, default=TIME_LIMIT, help="seconds after which no new cell begins")
    parser.add_argument("--commit", help="commit of the sources, for a copy of them without their repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the result")


def _git_commit() -> str:
    """Commit of the source tree this module lies in, with ``+`` when it has changes; ``unknown`` elsewhere."""
    folder = Path(fa3.__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        tracked = subprocess.run(
            ["git", "ls-files", "--error-unmatch", __file__], cwd=folder, capture_output=True, timeout=10
        )
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=folder, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    if tracked.returncode:
        return "unknown"  # installed into an environment that lies in somebody else's repository
    return head + ("+" if changed.returncode else "")


def _without_folder(argument: str) -> str:
    """An argument without the folders of a path: those of one machine mean nothing on another."""
    return argument if "/" not in argument else Path(argument).name


def _dsl_version() -> str | None:
    """Version of the DSL that made the kernels: of the artifacts in the store, else of the installed package."""
    from fa3.compiler.store import default_store
    from fa3.presets import shipped_specs

    with contextlib.suppress(FA3Error):
        store = default_store()
        for spec in shipped_specs("forward"):
            known = store.facts(spec)
            if known is not None:
                return str(known["dsl"])
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


def facts(
    device: torch.device, sensors: Sensors, impls: Sequence[Impl], missing: dict[str, str], commit: str | None
) -> Row:
    """The head of a result file: the machine, the versions, and what was run."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "sm_count": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "driver": sensors.driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cutlass": _dsl_version(),
        "fa3": fa3.__version__,
        "commit": commit or _git_commit(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["fa3", *map(_without_folder, sys.argv[1:])]),
        "impls": {impl.name: impl.version for impl in impls},
        "missing": missing,
        "notes": [] if sensors.problem is None else [sensors.problem],
        "rows": [],
    }


def print_result(result: Row, direction: str) -> None:
    """The rows as tables, then the notes, and who was not measured."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a log file has no edge to wrap at
    for table in _tables(result) if direction == "fwd" else gradients.short_tables(result):
        console.print(table)
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False)
    for name, reason in result["missing"].items():
        console.print(f"not measured: {name}: {reason}", highlight=False)


def _tables(result: Row) -> Iterator[Table]:
    """One a regime: TFLOPS of each implementation, and fa3's ratio to each peer."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows: list[Row] = result["rows"]
    head = result["gpu"] or "CPU"
    for regime in ("host", "burst", "steady"):
        group = [entry for entry in rows if entry["regime"] == regime]
        if not group:
            continue
        if regime == "host":
            table = Table("impl", "host time of a call", title=f"{head}, no waiting between calls", box=SIMPLE_HEAD)
            for entry in group:
                table.add_row(entry["impl"], f"{entry['host_us']:.1f} us")
        else:
            # The fastest of fa3's own where an ablation has several.
            ours: dict[tuple[Any, ...], float] = {}
            for entry in group:
                if entry["impl"] == "fa3":
                    ours[_cell_key(entry)] = min(entry["ms"], ours.get(_cell_key(entry), entry["ms"]))
            lines = [_cells_of(entry, ours.get(_cell_key(entry)), result["sm_count"]) for entry in group]
            # What this machine does not tell is no column.
            told = [name for name in lines[0] if any(line[name] for line in lines)]
            table = Table(title=f"{head}, {regime}", box=SIMPLE_HEAD)
            for name in told:
                table.add_column(name, justify="left" if name in ("cell", "impl") else "right", no_wrap=True)
            for line in lines:
                table.add_row(*(line[name] for name in told))
        yield table


def _cell_key(entry: Row) -> tuple[Any, ...]:
    return tuple(entry[field] for field in ("dtype", "d", "causal", "b", "s", "h", "hk"))


def _cells_of(entry: Row, ours_ms: float | None, sm_count: int | None) -> dict[str, str]:
    """Column -> text of one row; the ratio is the time of this row to that of fa3."""
    clock, watts = entry["clock_mhz"], entry["watts"]
    mask = "causal" if entry["causal"] else "full"
    heads = "" if entry["h"] == entry["hk"] else f" {entry['h']}/{entry['hk']} heads"
    return {
        "cell": f"{entry['dtype']} {entry['d']}-{mask}-{entry['s']}{heads}",
        "batch": str(entry["b"]),
        "impl": str(entry.get("spec", entry["impl"])),
        "ms": f"{entry['ms']:.3f}",
        "TFLOPS": f"{entry['tflops']:.0f}" if entry["tflops"] >= 10 else f"{entry['tflops']:.3f}",
        "time / fa3": f"{entry['ms'] / ours_ms:.3f}" if ours_ms else "",
        "MHz": f"{clock:.0f}" if clock else "",
        "utilisation": f"{utilisation(entry['tflops'], sm_count, clock):.3f}" if clock and sm_count else "",
        "W": f"{watts:.0f}" if watts else "",
        "J a call": f"{watts * entry['ms'] / 1e3:.3f}" if watts else "",
    }


def _choose_cells(args: argparse.Namespace, on_gpu: bool) -> list[Cell]:
    tokens = args.tokens or (TOKENS if on_gpu else 2048)
    hidden = args.hidden or (HIDDEN if on_gpu else 512)
    if tokens < 1 or hidden < 1:
        raise ValueError(f"--tokens {tokens}, --hidden {hidden}: must be at least 1")
    if args.gqa:
        return [
            Cell(
                gradients.GQA_HEAD_DIM,
                shape.causal,
                shape.seqlen,
                shape.batch,
                shape.heads,
                shape.heads // shape.heads_kv,
            )
            for shape in gradients.GQA_SHAPES
        ]
    if args.cells:
        return parse_cells(args.cells, tokens, hidden)
    if args.ablation:
        # The paper's: batch 4, 16384 queries and keys, 16 heads.
        return parse_cells("128-full-16384", args.tokens or 4 * 16384, hidden)
    head_dims = parse_integers("--head-dims", args.head_dims) if args.head_dims else list(HEAD_DIMS)
    # Those that the goals are for.
    default = (SEQLENS if args.direction == "fwd" else gradients.GOAL_SEQLENS) if on_gpu else (512, 2048)
    seqlens = parse_integers("--seqlens", args.seqlens) if args.seqlens else list(default)
    masks = list(MASKS) if args.masks is None else args.masks.split(",")
    for mask in masks:
        if mask not in MASKS:
            raise ValueError(f"--masks {mask!r}: allowed are {', '.join(MASKS)}")
    if args.quick and not args.seqlens:
        seqlens = seqlens[1::2] or seqlens
    return [
        make_cell(head_dim, mask == "causal", seqlen, tokens, hidden)
        for head_dim, mask, seqlen in itertools.product(head_dims, masks, seqlens)
    ]


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the files. Returns 0, or 1 when nothing could be measured."""
    begin = time.perf_counter()
    _check_kind(args)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = "fp16" if args.ablation else args.dtype or ("bf16" if on_gpu else "fp32")
    cells = _choose_cells(args, on_gpu)
    if args.json:
        check_output("--json", args.json)
    if args.png:
        plots.require()
        check_output("--png", args.png)
    steady_seqlens = _steady_seqlens(STEADY if args.steady is None else args.steady, cells, on_gpu and not args.quick)
    names = tuple(args.impls.split(",")) if args.impls else _KERNELS_OF.get(_kind(args))
    impls, missing = peers.find(device, names, args.direction)
    sensors = Sensors(device)
    result = {"kind": _kind(args), **facts(device, sensors, impls, missing, args.commit)}
    if args.sweep or args.odd or args.fp8:
        return _run_shapes(args, result, device, sensors, impls, begin)
    # A graph cannot be made from tensors of inference mode.
    with torch.inference_mode() if args.direction == "fwd" else torch.enable_grad():
        if args.host:
            result["rows"] = measure_host(impls, dtype, device, result["notes"])
            cells = []
        for number, cell in enumerate(cells):
            if time.perf_counter() - begin > args.limit:
                result["notes"].append(f"stopped after {args.limit:g} s: {len(cells) - number} cells not measured")
                break
            entries: list[tuple[Impl, str | None]] = [(impl, None) for impl in impls]
            if args.ablation:
                entries = schedule_impls() + [entry for entry in entries if entry[0].name in ("official", "fa2")]
            tensors = inputs(cell, DTYPES[dtype], device)
            entrants = enter(entries, cell, tensors, device, result["notes"])
            warm_up(entrants, device, 0.1 if args.quick else WARM_UP_SECONDS if number == 0 else 0.2)
            rows = measure_cell(
                entrants,
                cell,
                dtype,
                device,
                sensors,
                burst_rounds=3 if args.quick else BURST_ROUNDS,
                steady_rounds=STEADY_ROUNDS if cell.seqlen in steady_seqlens else 0,
            )
            if args.direction != "fwd":
                gradients.add_ratios(rows)
            result["rows"] += rows
            del tensors, entrants
            write_result(result, args.json)
    write_result(result, args.json)
    print_result(result, args.direction)
    if args.json:
        print(f"wrote {args.json}")
    if args.png and result["rows"]:
        plots.save(plots.figure_of(result), args.png)
        print(f"wrote {args.png}")
    return 0 if result["rows"] else 1


def _check_kind(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that the kind of run has no use for, and for a kind that cannot run here."""
    kind = _kind(args).removesuffix("-speed")
    if kind in _USES:
        allowed = _USES[kind]
        for name in (*OF_THE_GRID, "impls"):
            # An option that was not given is None or, a flag, False.
            if name not in allowed and getattr(args, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')}: --{kind} has no use for it")
    if args.gqa:
        for name in SHAPE_OPTIONS:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: --gqa has no use for it")
    if args.direction != "fwd" and kind in ("sweep", "odd", "fp8", "ablation", "host"):
        raise ValueError(f"--direction {args.direction}: --{kind} measures the forward alone")
    if kind == "ablation" and args.dtype not in (None, "fp16"):
        raise ValueError(f"--ablation --dtype {args.dtype}: the ablation is the paper's, in fp16")
    if kind == "fp8" and args.dtype is not None:
        raise ValueError(f"--fp8 --dtype {args.dtype}: it measures e4m3, and bf16 beside it")
    if kind == "sweep" and args.head_dims:
        sweep.tile_classes(parse_integers("--head-dims", args.head_dims))
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    # A quick run of tiny shapes, of the tiled backend, shows on a CPU that everything works.
    tried_out = kind == "fp8" and args.quick and not torch.cuda.is_available()
    if kind in ("ablation", *_USES) and not (on_hopper or tried_out):
        raise ValueError(f"--{kind} measures fa3's own kernels: it needs a Hopper GPU")


def _in_time(shapes: Iterable[Any], limit: float, begin: float, notes: list[str]) -> Iterator[Any]:
    """The shapes, until the time is up; a note says how many are left."""
    left = list(shapes)
    while left:
        if time.perf_counter() - begin > limit:
            notes.append(f"stopped after {limit:g} s: {len(left)} shapes not measured")
            return
        yield left.pop(0)


def _run_shapes(
    args: argparse.Namespace,
    result: dict[str, Any],
    device: torch.device,
    sensors: Sensors,
    impls: Sequence[Impl],
    begin: float,
) -> int:
    """``fa3 bench --sweep``, ``--odd`` and ``--fp8``: one line a shape. Returns as `run`."""
    dtype, notes = DTYPES[args.dtype or "bf16"], result["notes"]
    measured: Iterator[tuple[list[Row], str]]
    if args.sweep:
        kinds = sweep.tile_classes(parse_integers("--head-dims", args.head_dims) if args.head_dims else None)
        shapes = _in_time(sweep.shapes(kinds), args.limit, begin, notes)
        measured = (([row], sweep.describe(row)) for row in sweep.sweep(device, dtype, shapes, sensors))
    elif args.fp8:
        shapes = _in_time(fp8_speed.jobs(args.quick), args.limit, begin, notes)
        if result["missing"].pop("fa3", None) is not None:
            notes.append("fa3 is its tiled backend here")
        groups = fp8_speed.measure(device, shapes, impls, sensors, result, args.quick)
        measured = ((rows, fp8_speed.describe(rows)) for rows in groups)
    else:
        shapes = _in_time(odd.SHAPES, args.limit, begin, notes)
        measured = ((rows, odd.describe(rows)) for rows in odd.measure_odd(device, dtype, shapes, impls, notes))
    with torch.inference_mode():
        for rows, line in measured:
            result["rows"] += rows
            print(line, flush=True)
            write_result(result, args.json)
    write_result(result, args.json)
    if args.fp8 and result["rows"]:
        print(fp8_speed.summary(result["rows"]))
    for note in notes:
        print(f"note: {note}")
    for name, reason in result["missing"].items():
        print(f"not measured: {name}: {reason}")
    if args.json:
        print(f"wrote {args.json}")
    return 0 if result["rows"] else 1


def _kind(args: argparse.Namespace) -> str:
    for kind in ("sweep", "odd"):
        if getattr(args, kind):
            return kind
    if args.fp8:
        return "fp8-speed"
    if args.host or args.ablation:
        return "host" if args.host else "ablation"
    kind = "gqa" if args.gqa else "speed"
    return kind if args.direction == "fwd" else f"{kind}-{args.direction}"


def _steady_seqlens(text: str, cells: Sequence[Cell], wanted: bool) -> set[int]:
    if not wanted or text == "none":
        return set()
    if text == "all":
        return {cell.seqlen for cell in cells}
    return set(parse_integers("--steady", text))
