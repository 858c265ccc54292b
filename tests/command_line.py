"""What tests of the command line share: an empty store, the script of the figures, and rows of result files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fa3.cli import measure, peers, timing
from fa3.compiler.store import default_store

ROOT = Path(__file__).resolve().parents[1]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The user's store is a folder that is not there yet."""
    monkeypatch.setenv("FA3_STORE", str(tmp_path / "store"))
    default_store.cache_clear()
    yield
    default_store.cache_clear()


def figures_script() -> ModuleType:
    """The script that writes tables and pictures from result files."""
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "scripts" / "make_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(impl: str = "fa3", **changes: Any) -> dict[str, Any]:
    """A row of a result file."""
    cell = measure.make_cell(128, False, 16384, 16384, 2048)
    entrant = measure.Entrant(peers.Impl(impl, "1", lambda q, k, v, causal: lambda: None), [], 3.0)
    fields = measure.row(entrant, cell, "bf16", timing.Sample(3.0, 1600.0, 690.0), "burst")
    return {**fields, **changes}


def result(
    kind: str = "speed", rows: Sequence[dict[str, Any]] = (), date: str = "2026-01-02T03:04:05+00:00"
) -> dict[str, Any]:
    """A result file."""
    head = {
        "kind": kind,
        "gpu": "NVIDIA H200",
        "sm_count": 132,
        "driver": "580.1",
        "cuda": "13.0",
        "torch": "2.11.0",
        "cutlass": "4.8.1",
        "fa3": "0.1.0",
        "commit": "0123456789abcdef",
        "date": date,
        "command": "fa3 bench",
        "impls": {"fa3": "0.1.0", "fa2": "torch 2.11.0"},
        "missing": {},
        "notes": [],
    }
    return {**head, "rows": list(rows)}
