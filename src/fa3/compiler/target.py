"""What an artifact is compiled for, and the DSL's one library that it needs when it runs.

Nothing here imports the DSL: a machine that only runs artifacts has none.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from fa3.errors import CompileError, StoreError

#: Release of the CuTe DSL (``nvidia-cutlass-dsl``) that the kernels are written for.
DSL_VERSION = "4.8"

#: CUDA majors the DSL is published for, newest first, with fa3's extra that installs each.
CUDA_MAJORS = {13: "hopper", 12: "hopper-cu12"}

#: CUDA major -> the package that the extra asks for, without its version.
_DSL_PACKAGES = {13: "nvidia-cutlass-dsl[cu13]", 12: "nvidia-cutlass-dsl"}

#: File name of the DSL's runtime library, which every artifact is linked against.
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"


@dataclass(frozen=True)
class Target:
    """Machine that an artifact is for; a part of its key in the store.

    Attributes:
        cuda_major: CUDA major of the assembler and of the runtime library: 13 or 12.
        arch: GPU architecture.
        host: CPU architecture of the host code, as in ``platform.machine()``.
        tvm_ffi_abi: ``major.minor`` of tvm-ffi, whose C interface is stable inside one such series.
    """

    cuda_major: int
    arch: str = "sm_90a"
    host: str = platform.machine()
    tvm_ffi_abi: str = "0.1"

    def as_dict(self) -> dict[str, str | int]:
        """Plain dict of the fields, for JSON."""
        return {
            "cuda_major": self.cuda_major,
            "arch": self.arch,
            "host": self.host,
            "tvm_ffi_abi": self.tvm_ffi_abi,
        }


def dsl_remedy(cuda_major: int | None = None) -> str:
    """How to install the DSL for a CUDA major (default: the newest), for error messages."""
    major = cuda_major if cuda_major in CUDA_MAJORS else next(iter(CUDA_MAJORS))
    assert major is not None
    return (
        f'pip install "{_DSL_PACKAGES[major]}=={DSL_VERSION}.*" '
        f"(in fa3's source tree: pip install '.[{CUDA_MAJORS[major]}]')"
    )


def default_target() -> Target:
    """Target of this machine.

    The CUDA major follows the rule of the DSL itself: the newest installed flavour that the driver runs;
    without a driver the newest installed one; without any flavour the newest that the driver runs.
    ``FA3_CUDA`` (``12`` or ``13``) overrides.

    Raises:
        CompileError: ``FA3_CUDA`` is neither, or the driver is older than CUDA 12.
    """
    return Target(cuda_major=_cuda_major(), tvm_ffi_abi=tvm_ffi_abi())


def target_for(cuda_major: int | None) -> Target:
    """``default_target()`` with the CUDA major given, if one is."""
    if cuda_major is None:
        return default_target()
    if cuda_major not in CUDA_MAJORS:
        raise CompileError(f"CUDA major {cuda_major}: allowed are {', '.join(map(str, CUDA_MAJORS))}")
    return Target(cuda_major=cuda_major, tvm_ffi_abi=tvm_ffi_abi())


def _cuda_major() -> int:
    asked = os.environ.get("FA3_CUDA")
    if asked:
        if asked not in {str(major) for major in CUDA_MAJORS}:
            raise CompileError(f"FA3_CUDA={asked!r}: allowed are {', '.join(map(str, CUDA_MAJORS))}")
        return int(asked)
    driver = driver_cuda_version()
    runs = [major for major in CUDA_MAJORS if driver is None or driver[0] >= major]
    if not runs:
        raise CompileError(f"the CUDA driver supports CUDA {driver}: fa3 needs 12.9 (driver 575.51) or newer")
    installed = installed_flavours()
    return next((major for major in runs if major in installed), runs[0])


@functools.cache
def driver_cuda_version() -> tuple[int, int] | None:
    """Newest CUDA (major, minor) that the installed driver runs, None without a driver. Touches no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def tvm_ffi_abi() -> str:
    """``major.minor`` of the installed tvm-ffi; that of the supported series if there is none."""
    try:
        version = importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return Target.tvm_ffi_abi
    return ".".join(version.split(".")[:2])


def dsl_folder() -> Path | None:
    """Folder of the installed ``nvidia_cutlass_dsl``, found without importing it; None if not installed."""
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def installed_flavours() -> tuple[int, ...]:
    """CUDA majors whose flavour of the DSL is installed, newest first."""
    folder = dsl_folder()
    if folder is None:
        return ()
    return tuple(major for major in CUDA_MAJORS if (folder / f"cu{major}" / "lib" / RUNTIME_LIBRARY).is_file())


def dsl_installed() -> bool:
    """True if kernels can be compiled here, judged without importing the DSL."""
    folder = dsl_folder()
    return folder is not None and (folder / "dsl_packages" / "cutlass").is_dir()


def runtime_library(cuda_major: int) -> Path:
    """Path of the DSL's runtime library for this CUDA major.

    ``FA3_CUTE_RUNTIME`` names the file, or a folder with it (or with ``cu13/``, ``cu12/`` folders);
    without it the library of the installed package is taken.

    Raises:
        StoreError: there is none; the message names the places looked in and the remedy.
    """
    asked = os.environ.get("FA3_CUTE_RUNTIME")
    if asked:
        given = Path(os.path.expanduser(asked))
        places = [given, given / RUNTIME_LIBRARY, given / f"cu{cuda_major}" / RUNTIME_LIBRARY]
    else:
        folder = dsl_folder()
        places = [] if folder is None else [folder / f"cu{cuda_major}" / "lib" / RUNTIME_LIBRARY]
    for place in places:
        if place.is_file():
            return place
    where = f"FA3_CUTE_RUNTIME={asked!r}" if asked else "no package nvidia-cutlass-dsl of this CUDA major"
    raise StoreError(
        f"{RUNTIME_LIBRARY} for CUDA {cuda_major} not found ({where}): "
        f"{dsl_remedy(cuda_major)}, or set FA3_CUTE_RUNTIME to that file or its folder"
    )


@functools.cache
def load_runtime_library(cuda_major: int) -> ctypes.CDLL:
    """Load the runtime library, so that the loader finds it by its name when an artifact asks for it."""
    path = runtime_library(cuda_major)
    try:
        # Local, not global: it carries an LLVM of its own whose symbols must not meet those of other packages.
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise StoreError(f"cannot load {path}: {error}") from error
