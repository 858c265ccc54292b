"""Entry of the command line: picks the subcommand, and turns expected errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import fa3
from fa3.errors import FA3Error

#: Subcommand -> what it does. The module of the same name in this package does it.
COMMANDS = {
    "demo": "attention on a real-sized problem against the oracle: error, memory, time, and a picture",
    "explain": "the way of one call from flash_attn_func to the launch, with the reason of each choice",
    "check": "is this machine ready, and what to do if it is not",
    "bench": "speed beside the peers found on this machine",
    "compile": "compile kernels into a store; needs no GPU",
    "inspect": "registers, shared memory, spills and instruction counts of compiled kernels",
}

#: Exit code of a bad argument or an error that fa3 explains itself, as argparse has it.
USAGE_ERROR = 2
#: Exit code of a command stopped by Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; the parsed namespace holds ``run``, the function to call."""
    top = argparse.ArgumentParser(
        prog="fa3", description="Exact attention for Hopper GPUs: FlashAttention-3 in Python.", allow_abbrev=False
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"fa3.cli.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fa3 ARGV`` and return its exit code: 0 done, 1 not, 2 bad arguments, 130 interrupted."""
    top = parser()
    args = top.parse_args(argv)
    if args.version:
        print(f"fa3 {fa3.__version__}")
        return 0
    if args.command is None:
        top.print_help()
        return USAGE_ERROR
    try:
        return int(args.run(args))
    except (FA3Error, ValueError, NotImplementedError) as error:
        print(f"fa3 {args.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"fa3 {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
