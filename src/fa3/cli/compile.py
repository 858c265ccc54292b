"""``fa3 compile``: fill a store, several processes at a time. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fa3.compiler.build import Outcome, compile_many
from fa3.compiler.store import Store, default_store
from fa3.compiler.target import target_for
from fa3.errors import FA3Error
from fa3.presets import PRESETS, shipped_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``fa3 compile``."""
    parser.add_argument("--preset", choices=PRESETS, default="forward", help="which specs (default: forward)")
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time, 450 MB each"
    )
    add_store_arguments(parser)


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose the store and what its artifacts are for."""
    parser.add_argument(
        "--store", metavar="DIR", help="folder of artifacts (default: FA3_STORE, else the user's cache)"
    )
    parser.add_argument("--cuda", type=int, choices=(12, 13), help="CUDA major (default: FA3_CUDA, else this machine)")


def store_of(args: argparse.Namespace) -> Store:
    """The store that these options choose."""
    if args.store:
        return Store([args.store], target_for(args.cuda))
    store = default_store()
    return store if args.cuda is None else store.for_target(target_for(args.cuda))


def run(args: argparse.Namespace) -> int:
    """Compile; 0 if every spec of the preset is in the store afterwards, else 1."""
    if args.jobs < 1:
        print(f"fa3 compile: --jobs {args.jobs}: must be at least 1", file=sys.stderr)
        return 2
    specs = shipped_specs(args.preset)
    start = time.monotonic()
    try:
        store = store_of(args)
        folder = store.writable_folder()
        with _progress(len(specs)) as progress:
            outcomes = compile_many(specs, store, args.jobs, progress)
    except FA3Error as error:
        print(f"fa3 compile: {error}", file=sys.stderr)
        return 1
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    for failure in errors:
        print(f"fa3 compile: {failure}", file=sys.stderr)
    new = sum(not outcome.was_there and outcome.error is None for outcome in outcomes)
    print(
        f"{folder}: {new} compiled, {len(outcomes) - new - len(errors)} were there, {len(errors)} failed, "
        f"for {store.target.arch} and CUDA {store.target.cuda_major}, {time.monotonic() - start:.1f} s"
    )
    return 1 if errors else 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A bar on a terminal if rich is there, else one line for each spec."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (TextColumn("compile"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=total)
                yield lambda outcome: bar.update(task, advance=1, description=outcome.spec.name)
            return
    count = 0

    def line(outcome: Outcome) -> None:
        nonlocal count
        count += 1
        state = "failed" if outcome.error else "there" if outcome.was_there else f"{outcome.seconds:.1f} s"
        print(f"[{count}/{total}] {outcome.spec.name} {state}", file=sys.stderr, flush=True)

    yield line
