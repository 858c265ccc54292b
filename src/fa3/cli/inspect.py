"""``fa3 inspect``: what the assembler made of the kernels, and whether it keeps what their specs promise."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3.cli.compile import add_store_arguments, store_of
from fa3.compiler import inspect
from fa3.errors import CompileError, FA3Error
from fa3.kernel_spec import spec_from_dict
from fa3.presets import PRESETS, shipped_specs

if TYPE_CHECKING:
    from fa3.kernel_spec import KernelSpec

_COLUMNS = (
    "kernel",
    "regs",
    "setmaxreg",
    "smem",
    "stack",
    "local",
    "spills",
    "HGMMA",
    "waits",
    "UTMALDG",
    "UTMASTG",
    "EX2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``fa3 inspect``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--preset", choices=PRESETS, help="all specs of a preset (default: forward)")
    which.add_argument("artifact", nargs="?", help="name of a shipped spec, or path of a kernel.so or its folder")
    parser.add_argument("--sass", type=Path, metavar="FILE", help="write the machine code of one kernel to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Inspect; 0 if every kernel is there and keeps its promises, else 1."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    absent: list[str] = []
    try:
        artifacts = list(_artifacts(args))
        if args.sass and len(artifacts) != 1:
            raise CompileError(f"--sass {args.sass}: name one kernel, {len(artifacts)} are chosen")
        for name, spec, path in artifacts:
            if path is None:
                absent.append(name)
                continue
            cubin = inspect.cubin_of(path.read_bytes())
            if args.sass:
                args.sass.write_text(inspect.disassemble(cubin))
            report = inspect.report(cubin)
            promises = [] if spec is None else inspect.check(spec, report)
            broken += [f"{name}: {promise}" for promise in promises]
            shared = None if spec is None else spec.shared_bytes
            rows.append({"name": name, "shared_dynamic": shared, **asdict(report), "broken": promises})
    except (FA3Error, OSError) as error:
        print(f"fa3 inspect: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)
    for sentence in broken:
        print(f"fa3 inspect: {sentence}", file=sys.stderr)
    for name in absent:
        print(f"fa3 inspect: {name}: not in the store: fa3 compile", file=sys.stderr)
    if not args.json:
        missing = f", {len(absent)} not in the store" if absent else ""
        print(f"{len(rows)} kernels inspected, {len(broken)} broken promises{missing}")
    return 1 if broken or absent else 0


def _artifacts(args: argparse.Namespace) -> Iterator[tuple[str, KernelSpec | None, Path | None]]:
    """Name, spec and shared object of each chosen kernel; None where it is not known or not there."""
    if args.artifact and Path(args.artifact).exists():
        path = Path(args.artifact)
        if path.is_dir():
            path /= "kernel.so"
        try:
            spec = spec_from_dict(json.loads(path.with_name("facts.json").read_text())["spec"])
        except (OSError, ValueError, KeyError, TypeError):
            yield path.name, None, path
        else:
            yield spec.name, spec, path
        return
    specs = shipped_specs("all" if args.artifact else args.preset or "forward")
    if args.artifact:
        specs = tuple(spec for spec in specs if spec.name == args.artifact)
        if not specs:
            raise CompileError(f"{args.artifact!r}: neither a shipped spec (fa3 inspect --preset all) nor a file")
    store = store_of(args)
    for spec in specs:
        yield spec.name, spec, store.find(spec)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a kernel; overlap is the exponentials under a product, in each main loop."""
    table = [(*_COLUMNS, "overlap", "promises")]
    for row in rows:
        shared = "?" if row["shared_dynamic"] is None else row["shared_dynamic"] + row["shared_static"]
        numbers = (row[name] for name in ("stack", "local", "spills", "hgmma", "waits", "utmaldg", "utmastg", "exp2"))
        table.append(
            (
                row["name"],
                str(row["registers"]),
                "/".join(map(str, row["setmaxreg"])) or "-",
                str(shared),
                *map(str, numbers),
                " ".join(map(str, row["overlap"])) or "-",
                # Without its spec nothing is known of what a kernel promises.
                "?" if row["shared_dynamic"] is None else "broken" if row["broken"] else "kept",
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print(line[0].ljust(widths[0]), *cells, sep="  ")
