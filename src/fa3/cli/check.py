"""Is this machine ready: GPU, driver, packages, compiler, store; and what to do about what is missing.

Exit code 0: fa3 runs here with its best backend for this machine. 1: there is a Hopper GPU and it cannot be used,
or fa3 cannot run at all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fa3.compiler import build, target
from fa3.compiler.store import Store, default_store
from fa3.errors import FA3Error

if TYPE_CHECKING:
    from collections.abc import Iterator

#: First driver that runs each extra's artifacts: CUDA 13 and CUDA 12.9.
DRIVERS = {"hopper": (580, 0), "hopper-cu12": (575, 51)}

Status = Literal["ok", "note", "missing"]
SIGNS: dict[Status, str] = {"ok": "ok", "note": "--", "missing": "NO"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        status: ``ok``; ``note``, not needed for what this machine can do; ``missing``, needed and not there.
        found: what is there.
        remedy: what to do, if anything.
    """

    subject: str
    status: Status
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 check``."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def parse_driver(text: str) -> tuple[int, int]:
    """``580.95.05`` -> ``(580, 95)``. Raises ``ValueError`` when it is no driver version."""
    parts = text.strip().split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ValueError(f"driver version {text!r}: expected MAJOR.MINOR")
    return int(parts[0]), int(parts[1])


def driver_version() -> str | None:
    """Version of the NVIDIA driver, from NVML or from the kernel module; None if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # not installed, or no driver below it: the kernel module's own word is next
        pass
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def extra_for_driver(version: tuple[int, int]) -> str | None:
    """The extra whose artifacts this driver runs, the newer one first; None if it runs neither."""
    return next((extra for extra, least in DRIVERS.items() if version >= least), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hopper() -> tuple[bool, str]:
    """Is a Hopper GPU there, and what is there."""
    import torch

    if not torch.cuda.is_available():
        return False, "none that torch can use"
    names = []
    hopper = False
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        hopper |= (major, minor) == (9, 0)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return hopper, ", ".join(names)


def _machine(hopper: bool, gpus: str) -> Iterator[Finding]:
    supported = sys.platform == "linux" and platform.machine() == "x86_64"
    yield Finding(
        "system",
        "ok" if supported else "missing" if hopper else "note",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "" if supported else "kernels are built for Linux on x86-64; elsewhere the tiled backend runs",
    )
    yield Finding(
        "GPU",
        "ok" if hopper else "note",
        gpus,
        "" if hopper else "the hopper backend needs an H100, H800 or H200; without one, sdpa or tiled runs",
    )
    version = driver_version()
    if version is None:
        driver_remedy = "install NVIDIA's driver, 580 or newer, if this machine has a GPU"
        yield Finding("driver", "missing" if hopper else "note", "none", driver_remedy)
    else:
        extra = extra_for_driver(parse_driver(version))
        fits = f"fits the extra {extra}" if extra else "too old"
        remedy = "" if extra else "driver 580 on runs the extra hopper, 575.51 on runs hopper-cu12"
        yield Finding("driver", "ok" if extra else "missing" if hopper else "note", f"{version}, {fits}", remedy)


def _packages(hopper: bool) -> Iterator[Finding]:
    import torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    has_driver = target.driver_cuda_version() is not None
    wrong_torch = has_driver and torch.version.cuda is None
    yield Finding(
        "torch",
        "missing" if wrong_torch else "ok",
        f"{torch.__version__}, {cuda}",
        "this machine has a GPU driver: install a torch built for CUDA" if wrong_torch else "",
    )
    ffi = _version("apache-tvm-ffi")
    yield Finding("tvm-ffi", "ok" if ffi else "missing", ffi or "none", "" if ffi else "pip install apache-tvm-ffi")


def _compile_side(hopper: bool, artifacts: int) -> Iterator[Finding]:
    dsl = _version("nvidia-cutlass-dsl")
    # With artifacts in the store nothing is compiled, so what compiles is not needed.
    needed: Status = "missing" if hopper and not artifacts else "note"
    if dsl is None:
        remedy = f"to compile kernels here (no GPU is needed for that): {target.dsl_remedy()}"
        yield Finding("CuTe DSL", needed, "none", remedy)
    elif not dsl.startswith(target.DSL_VERSION + "."):
        remedy = f"{target.DSL_VERSION}.* is supported: {target.dsl_remedy()}"
        yield Finding("CuTe DSL", needed, dsl, remedy)
    else:
        majors = ", ".join(f"CUDA {major}" for major in target.installed_flavours()) or "no flavour"
        yield Finding("CuTe DSL", "ok", f"{dsl}, for {majors}")
    try:
        major = target.default_target().cuda_major
        library = target.runtime_library(major)
        yield Finding("runtime library", "ok", f"{library} (CUDA {major})")
    except FA3Error as error:
        yield Finding("runtime library", "missing" if hopper else "note", "none", str(error))
    try:
        yield Finding("C compiler", "ok", build.c_compiler())
    except FA3Error as error:
        yield Finding("C compiler", needed, "none", str(error))


def count_artifacts(folder: Path) -> int:
    """Complete artifacts of any spec, source or target in a store folder."""
    try:
        return sum(1 for _ in folder.glob("??/*/facts.json"))
    except OSError:
        return 0


def _store(store: Store, hopper: bool, complete: bool) -> Iterator[Finding]:
    """The folders, and whether a new artifact has a place; which matters where the store is not ``complete``."""
    trouble: Status = "missing" if hopper else "note"
    for folder in store.folders:
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            if folder in store.read_only:
                continue  # the package came without artifacts: nothing to say
            yield Finding("store", "note", f"{folder}: not there yet")
            continue
        except OSError as error:
            yield Finding("store", trouble, f"{folder}: {error.strerror}", "let this user read it")
            continue
        if not stat.S_ISDIR(mode):
            yield Finding("store", trouble, f"{folder}: not a folder", "name a folder in FA3_STORE")
            continue
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = f"an artifact is code: chmod -R go-w {folder}"
            yield Finding("store", trouble, f"{folder}: others may write to it", remedy)
            continue
        writable = folder not in store.read_only and os.access(folder, os.W_OK | os.X_OK)
        access = "writable" if writable else "read-only"
        yield Finding("store", "ok", f"{folder}: {count_artifacts(folder)} artifacts, {access}")
    try:
        store.writable_folder(make=False)
    except FA3Error as error:
        yield Finding("new artifacts", "note" if complete else trouble, "no place for them", str(error))


def usable_artifacts(store: Store) -> tuple[int, int]:
    """(usable here, shipped): forward kernels in the store for this machine, and all that fa3 ships."""
    from fa3.presets import shipped_specs

    specs = shipped_specs("forward")
    return sum(store.find(spec) is not None for spec in specs), len(specs)


def findings() -> tuple[list[Finding], bool]:
    """Everything that was looked at, and whether this machine is ready."""
    hopper, gpus = _hopper()
    found = [*_machine(hopper, gpus), *_packages(hopper)]
    artifacts = shipped = 0
    store_lines: list[Finding] = []
    try:
        store = default_store()
        try:
            artifacts, shipped = usable_artifacts(store)
        finally:
            store_lines = list(_store(store, hopper, complete=0 < shipped == artifacts))
        remedy = ""
        if artifacts < shipped:
            remedy = "fa3 compile --preset forward fills it; else the first call compiles"
            if any(finding.subject == "new artifacts" for finding in store_lines):
                remedy = "fa3 compile --preset forward --store DIR fills a folder of yours: name it in FA3_STORE"
        counted = f"{artifacts} of {shipped} shipped forward kernels, of this version and for this machine"
        store_lines.append(Finding("kernels", "ok" if artifacts else "note", counted, remedy))
    except FA3Error as error:
        store_lines.append(Finding("store", "missing" if hopper else "note", "cannot be used", str(error)))
    found += [*_compile_side(hopper, artifacts), *store_lines]
    return found, not any(finding.status == "missing" for finding in found)


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0 when ready, else 1."""
    found, ready = findings()
    hopper = any(finding.subject == "GPU" and finding.status == "ok" for finding in found)
    best = "hopper" if hopper else "tiled"
    if not hopper:
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8:
            best = "sdpa"
    verdict = f"ready, with the {best} backend" if ready else "not ready: see the lines marked NO"
    if args.json:
        report = {"ready": ready, "backend": best, "findings": [asdict(finding) for finding in found]}
        print(json.dumps(report, indent=1))
        return 0 if ready else 1
    width = max(len(finding.subject) for finding in found)
    for finding in found:
        print(f"{SIGNS[finding.status]}  {finding.subject:{width}}  {finding.found}")
        if finding.remedy:
            print(f"    {'':{width}}  -> {finding.remedy}")
    print(f"\n{verdict}")
    return 0 if ready else 1
