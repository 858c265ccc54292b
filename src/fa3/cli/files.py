"""Files that a command writes at its end, checked at its start."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def check_output(option: str, path: Path) -> None:
    """Make the folder of ``path`` and see that a file can be written there, before minutes are spent.

    Raises:
        ValueError: it cannot; the message names the option, the path and the reason.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path}: a folder, expected the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} {path}: not a regular file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Asking for permission is not enough: it is always granted to root, in /proc too.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot write there: {error.strerror}") from error
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: the file is there and read-only")


def write_result(result: dict[str, Any], path: Path | None) -> None:
    """Write a result file in one step, so that an interrupted run leaves what it had; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def positive_integer(text: str) -> int | None:
    """The number that plain decimal digits give if it is at least 1 and below 2**31, else None."""
    text = text.strip()
    # isdigit() alone lets through superscripts, which int() does not take; int() takes no endless row of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    number = int(text)
    return number if 1 <= number < 2**31 else None
