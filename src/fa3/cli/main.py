"""Entry of the command line: picks the subcommand, and turns expected errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
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
    "accuracy": "the error of FP8 attention, by how q, k and v are quantized, beside 16 bits and the peers",
    "compile": "compile kernels into a store; needs no GPU",
    "inspect": "registers, shared memory, spills and instruction counts of compiled kernels",
}

#: Exit code of a bad argument or an error that fa3 explains itself, as argparse has it.
USAGE_ERROR = 2
#: Exit code of a command that could not do its work.
FAILED = 1
#: Exit code of a command stopped by Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; the parsed namespace holds ``run``, the function to call."""
    top = argparse.ArgumentParser(
        prog="fa3", description="Exact attention for Hopper GPUs: FlashAttention-3 in Python.", allow_abbrev=False
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    top.add_argument("--traceback", action="store_true", help="show where an error comes from (fa3 --traceback ...)")
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
    args = top.parse_args(_with_lists(sys.argv[1:] if argv is None else argv))
    if args.version:
        print(f"fa3 {fa3.__version__}")
        return 0
    if args.command is None:
        top.print_help()
        return USAGE_ERROR
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone, e.g. `head`; Python would complain once more when it closes the pipe.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
        if args.traceback:
            raise
        print(f"fa3 {args.command}: {_one_line(error)}", file=sys.stderr)
        explained = isinstance(error, (FA3Error, ValueError, TypeError, NotImplementedError))
        return USAGE_ERROR if explained else FAILED
    except KeyboardInterrupt:
        print(f"fa3 {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _with_lists(argv: Sequence[str]) -> list[str]:
    """``--window -1,0`` as ``--window=-1,0``: argparse takes a list that begins with a minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if re.fullmatch(r"-[0-9]+(,-?[0-9]+)+", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _one_line(error: Exception) -> str:
    """What the user needs of an error; fa3's own messages are whole, those of PyTorch go on for pages."""
    if isinstance(error, (FA3Error, ValueError, NotImplementedError)):
        return str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, MemoryError) or "memory" in first.lower():
        return f"not enough memory: {first}"
    return f"{type(error).__name__}: {first}"
