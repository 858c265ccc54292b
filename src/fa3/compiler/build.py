"""Spec to artifact: compile with the CuTe DSL, link with the system's compiler. Needs no GPU and no driver.

``cute.compile`` is not thread-safe and the CUDA flavour of the DSL is fixed by its import, so every
compilation runs in a worker process (``python -m fa3.compiler.build``) that takes requests as lines of JSON.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fa3.compiler import inspect
from fa3.compiler.target import (
    DSL_VERSION,
    RUNTIME_LIBRARY,
    Target,
    dsl_folder,
    dsl_installed,
    dsl_remedy,
    installed_flavours,
)
from fa3.errors import CompileError, FA3Error
from fa3.kernel_spec import spec_from_dict

if TYPE_CHECKING:
    from fa3.compiler.store import Store

#: Package with ``compile_spec(spec, options)`` and ``entry_symbol(spec)``.
KERNELS = "fa3.kernels"

#: Name of the DSL's own extension module, which exists once for each CUDA major.
_DSL_EXTENSION = "cutlass._mlir._mlir_libs._cutlass_ir"


class Spec(Protocol):
    """What the compiler needs to know of a spec."""

    @property
    def name(self) -> str:
        """Short unique name."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""

    def as_dict(self) -> dict[str, Any]:
        """Plain dict of all fields."""


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel: a shared object for ``tvm_ffi.load_module`` and what is known about it."""

    shared_object: bytes
    facts: dict[str, Any] = dataclasses.field(hash=False)


@dataclass(frozen=True)
class Outcome:
    """What became of one spec in ``compile_many``: ``facts``, or else ``error``.

    ``was_there`` is True if this process did not compile it: it was in the store, or another process put it there.
    """

    spec: Spec
    facts: dict[str, Any] | None
    error: FA3Error | None
    seconds: float
    was_there: bool


def build(spec: Spec, target: Target, kernels: str = KERNELS) -> Artifact:
    """Compile one spec in a process of its own; ``kernels`` names the package that has its kernel.

    Raises:
        CompileError: DSL, C compiler or CUDA flavour missing, or the compilation failed.
    """
    require_compiler(target)
    with Worker(target, kernels) as worker:
        return worker.build(spec)


def compile_many(
    specs: Iterable[Spec],
    store: Store,
    jobs: int = 1,
    progress: Callable[[Outcome], None] | None = None,
    kernels: str = KERNELS,
) -> list[Outcome]:
    """Fill the store, ``jobs`` processes at a time; specs that are there already are not compiled again.

    ``progress`` is called after each spec, in the calling thread. An error of one spec does not stop the others.
    An exception in the calling thread (Ctrl-C, or of ``progress``) ends all compiling processes before it goes on.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: must be at least 1")
    waiting: queue.SimpleQueue[Spec] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    unique = list(dict.fromkeys(specs))
    for spec in unique:
        waiting.put(spec)
    stop = threading.Event()
    running: list[Worker] = []
    running_lock = threading.Lock()

    def start_worker() -> Worker:
        with running_lock:
            if stop.is_set():
                raise CompileError("stopped")
            running.append(Worker(store.target, kernels))
            return running[-1]

    def serve() -> None:
        worker: Worker | None = None
        compiled: set[Spec] = set()

        def compile_one(spec: Spec) -> Artifact:
            nonlocal worker
            require_compiler(store.target)
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.close()
                worker = start_worker()
            artifact = worker.build(spec)
            compiled.add(spec)
            return artifact

        try:
            while not stop.is_set():
                try:
                    spec = waiting.get_nowait()
                except queue.Empty:
                    return
                start = time.monotonic()
                facts: dict[str, Any] | None = None
                error: FA3Error | None = None
                try:
                    facts = store.fill(spec, compile_one)
                except FA3Error as caught:
                    error = caught
                except Exception as caught:  # one spec must not end the others
                    error = CompileError(f"{spec.name}: {caught!r}")
                was_there = error is None and spec not in compiled
                done.put(Outcome(spec, facts, error, time.monotonic() - start, was_there))
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(jobs, len(unique)))]
    outcomes = []
    try:
        for thread in threads:
            thread.start()
        for _ in unique:
            outcomes.append(done.get())
            if progress is not None:
                progress(outcomes[-1])
    except BaseException:
        with running_lock:
            stop.set()
            for worker in running:
                worker.kill()
        for thread in filter(threading.Thread.is_alive, threads):
            # One that waits for the lock of another process holds no worker; it ends with this process.
            thread.join(timeout=5)
        raise
    for thread in threads:
        thread.join()
    return outcomes


def require_compiler(target: Target) -> None:
    """Raise ``CompileError`` with the remedy if this machine cannot compile for ``target``."""
    if not dsl_installed():
        raise CompileError(f"nvidia-cutlass-dsl {DSL_VERSION} is not installed: {dsl_remedy(target.cuda_major)}")
    if target.cuda_major not in installed_flavours():
        raise CompileError(
            f"the installed nvidia-cutlass-dsl has no flavour for CUDA {target.cuda_major}, "
            f"only for {installed_flavours()}: {dsl_remedy(target.cuda_major)}"
        )
    c_compiler()


def c_compiler() -> str:
    """Path of the C compiler that links artifacts: ``CC``, else gcc, cc or clang from PATH."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise CompileError(
        f"no C compiler to link with (looked for {', '.join(names)}): "
        "install gcc (Debian: apt-get install gcc), or set CC to another one"
    )


class Worker:
    """A process that compiles, one spec after the other, in a session of its own.

    A session of its own: Ctrl-C reaches the process that asked only, and that one ends this with its children. The
    folder for all their temporary files belongs to the asking process too, so a killed worker leaves nothing behind.
    """

    def __init__(self, target: Target, kernels: str = KERNELS) -> None:
        self._request = {"target": target.as_dict(), "kernels": kernels}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._scratch = tempfile.TemporaryDirectory(prefix="fa3-compile-", ignore_cleanup_errors=True)
        package_parent = str(Path(__file__).resolve().parents[2])
        path = [package_parent, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fa3.compiler.build", self._scratch.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "TMPDIR": self._scratch.name,
            },
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """True while the process can take another spec."""
        return self._process.poll() is None

    def build(self, spec: Spec) -> Artifact:
        """Compile ``spec``; raises ``CompileError`` with the end of the compiler's own message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # A modification of the caller's own is found where the caller would find it.
            request = {**self._request, "spec": spec.as_dict(), "path": [os.path.abspath(place) for place in sys.path]}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = b""
        if not answer:
            self.kill()
            self._log.seek(0)
            last_words = self._log.read().decode(errors="replace")[-4000:]
            raise CompileError(
                f"{spec.name}: the compiling process ended with code {self._process.returncode} "
                f"(-9: not enough memory, 450 MB are needed for each job)\n{last_words}"
            )
        result = json.loads(answer)
        if "error" in result:
            raise CompileError(f"{spec.name}: {result['error']}")
        return Artifact(base64.b64decode(result["shared_object"]), result["facts"])

    def kill(self) -> None:
        """End the process and its children at once; any thread may call it."""
        # Once waited for, its number may be another's.
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._scratch.cleanup()

    def close(self) -> None:
        """End the process, at once if it is between two specs, and free what it held."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


# ----------------------------------------------------------------------------------------------------------
# The worker's side


def _compile_and_link(spec: Spec, target: Target, kernels: ModuleType) -> Artifact:
    start = time.monotonic()
    import cutlass
    from cutlass.base_dsl.version_info import CUDA_VERSION

    if not cutlass.__version__.startswith(DSL_VERSION + "."):
        raise CompileError(
            f"nvidia-cutlass-dsl {cutlass.__version__} is installed, {DSL_VERSION}.* is supported: "
            f"{dsl_remedy(target.cuda_major)}"
        )
    symbol = kernels.entry_symbol(spec)
    compiled = kernels.compile_spec(spec, f"--enable-tvm-ffi --gpu-arch {target.arch} --keep-ptx --keep-cubin")
    with tempfile.TemporaryDirectory(prefix="fa3-link-") as folder:
        object_file = Path(folder) / "kernel.o"
        compiled.export_to_c(str(object_file), function_name=symbol)
        shared_object = _link(object_file, target)
    facts = {
        "name": spec.name,
        "spec": spec.as_dict(),
        "target": target.as_dict(),
        "symbol": symbol,
        "sha256": hashlib.sha256(shared_object).hexdigest(),
        "bytes": len(shared_object),
        "dsl": cutlass.__version__,
        "cuda": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        "shared_dynamic": spec.shared_bytes,
        "compile_seconds": round(time.monotonic() - start, 2),
        # None where the disassemblers are not installed; `fa3 inspect` then says what to install.
        **dict.fromkeys(field.name for field in dataclasses.fields(inspect.Report)),
        **(inspect.report_or_none(compiled.__cubin__) or {}),
    }
    return Artifact(shared_object, facts)


def _link(object_file: Path, target: Target) -> bytes:
    folder = dsl_folder()
    assert folder is not None
    import tvm_ffi

    libraries = [folder / f"cu{target.cuda_major}" / "lib" / RUNTIME_LIBRARY, Path(tvm_ffi.libinfo.find_libtvm_ffi())]
    out = object_file.with_suffix(".so")
    command = [c_compiler(), "-shared", "-o", str(out), str(object_file)]
    # By name, not by path, and without any rpath: the artifact must load on machines that keep them elsewhere.
    for library in libraries:
        command += [f"-L{library.parent}", f"-l:{library.name}"]
    command += ["-Wl,-z,defs", "-Wl,-z,noexecstack"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_RUN_PATH"}
    linked = subprocess.run(command, env=environment, capture_output=True, text=True)
    if linked.returncode:
        raise CompileError(f"linking failed: {' '.join(command)}\n{linked.stderr[-2000:]}")
    return out.read_bytes()


def _select_flavour(cuda_major: int) -> None:
    """Make ``import cutlass`` take this CUDA major.

    The package takes the newest installed flavour that the driver runs and has no switch for it, but it
    leaves its choice alone when its extension module is there already.
    """
    folder = dsl_folder()
    assert folder is not None
    libraries = folder / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    found = [path for path in libraries.glob(f"_cutlass_ir.cu{cuda_major}.*") if path.name.endswith(endings)]
    if not found:
        raise CompileError(f"the installed nvidia-cutlass-dsl has no CUDA {cuda_major} flavour for this Python")
    module_spec = importlib.util.spec_from_file_location(_DSL_EXTENSION, found[0])
    assert module_spec is not None
    assert module_spec.loader is not None
    extension = importlib.util.module_from_spec(module_spec)
    sys.modules[_DSL_EXTENSION] = extension
    module_spec.loader.exec_module(extension)
    parent = importlib.import_module(_DSL_EXTENSION.rpartition(".")[0])
    parent._cutlass_ir = extension  # type: ignore[attr-defined]


def _serve(scratch: str) -> None:
    # Answers go to the real standard output; whatever the DSL prints goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Without a dump folder the cubin is not kept; without these two the DSL writes into shared folders.
    os.environ["CUTE_DSL_DUMP_DIR"] = scratch
    os.environ["CUTE_DSL_CACHE_DIR"] = scratch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    selected = False
    for line in sys.stdin:
        request = json.loads(line)
        try:
            target = Target(**request["target"])
            sys.path[:] = [*request["path"], *(place for place in sys.path if place not in request["path"])]
            if not selected:
                _select_flavour(target.cuda_major)
                selected = True
            kernels = importlib.import_module(request["kernels"])
            make_spec = getattr(kernels, "spec_from_dict", spec_from_dict)
            artifact = _compile_and_link(make_spec(request["spec"]), target, kernels)
            answer = {
                "shared_object": base64.b64encode(artifact.shared_object).decode(),
                "facts": artifact.facts,
            }
        except CompileError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()[-4000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        for leftover in Path(scratch).iterdir():
            if leftover.is_file():
                leftover.unlink()


if __name__ == "__main__":
    try:
        _serve(sys.argv[1])
    finally:
        # Its owner does this too, unless it was killed.
        shutil.rmtree(sys.argv[1], ignore_errors=True)
