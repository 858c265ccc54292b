"""The store: folders of artifacts, one for each (spec, sources, target).

Layout: ``<folder>/<first two of the key>/<key>/kernel.so`` beside ``facts.json``. An artifact appears by one
rename of a complete folder, so a reader sees all of it or nothing; its content hash is checked at each load.

An artifact is code. Folders that we make are ours with mode 0700. Folders that we read must not be writable
by group or others, and must be owned by us, by root or by the owner of this package, or be named in
``FA3_STORE``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3.compiler.target import CUDA_MAJORS, Target, default_target, dsl_installed, load_runtime_library
from fa3.errors import CompileError, StoreError

if TYPE_CHECKING:
    from fa3.compiler.build import Artifact, Spec

_PACKAGE = Path(__file__).resolve().parents[1]

#: Artifacts that came with the package, if any.
PACKAGE_STORE = _PACKAGE / "artifacts"

_SHARED_OBJECT = "kernel.so"
_FACTS = "facts.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger("fa3.store")


@functools.cache
def sources_hash() -> str:
    """SHA-256 over the Python sources of ``kernels/`` and ``compiler/``, read once in a process."""
    digest = hashlib.sha256()
    for part in ("compiler", "kernels"):
        for path in sorted((_PACKAGE / part).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


class Store:
    """Stacked folders of artifacts, first hit wins; the first one that is ours and writable takes new ones.

    Args:
        folders: folders to look in, in this order. They need not exist.
        target: what the artifacts are for; the default is this machine.
        named: True if the user chose these folders, so that any owner is fine and an unsafe one is an error;
            False for default places, where an unsafe or foreign folder is passed over.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]], target: Target | None = None, named: bool = True):
        if not folders:
            raise StoreError("a store needs at least one folder: see FA3_STORE")
        self.folders = tuple(Path(folder) for folder in folders)
        self.target = default_target() if target is None else target
        self._named = named
        self._loaded: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def for_target(self, target: Target) -> Store:
        """The same folders, for artifacts of another target."""
        return Store(self.folders, target, self._named)

    def key(self, spec: Spec) -> str:
        """64 hex digits: SHA-256 over the spec, the sources of kernels and compiler, and the target."""
        identity = {"spec": spec.as_dict(), "sources": sources_hash(), "target": self.target.as_dict()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def find(self, spec: Spec) -> Path | None:
        """Path of the whole, checked shared object of ``spec``, or None.

        Raises:
            StoreError: a folder of the store that the user named is writable by others.
        """
        found = self._find(spec)
        return None if found is None else found[0]

    def facts(self, spec: Spec) -> dict[str, Any] | None:
        """What is known about the artifact of ``spec``, or None if there is no whole artifact."""
        found = self._find(spec)
        return None if found is None else found[1]

    def load(self, spec: Spec) -> Callable[..., Any]:
        """The compiled function of ``spec``: from memory, else from disk, else compiled and kept.

        Raises:
            CompileError: it is not there and cannot be compiled here; the message names the remedy.
            StoreError: a folder cannot be used, or the runtime library is missing.
        """
        function = self._loaded.get(spec)
        if function is not None:
            return function
        with self._lock:
            if spec not in self._loaded:
                found = self._find(spec)
                if found is None:
                    self._compile(spec)
                    found = self._find(spec)
                    if found is None:
                        raise StoreError(f"{spec.name}: compiled, but broken when read back from {self.folders}")
                self._loaded[spec] = self._open(*found)
            return self._loaded[spec]

    def put(self, spec: Spec, artifact: Artifact) -> Path:
        """Write an artifact and return the path of its shared object. Replaces a broken one.

        Raises:
            StoreError: no folder of the store is ours and writable.
        """
        folder = self.writable_folder()
        with self._locked(folder, spec):
            return self._write(folder, spec, artifact)

    def fill(self, spec: Spec, compile_one: Callable[[Spec], Artifact]) -> dict[str, Any]:
        """Facts of ``spec``, made by ``compile_one`` if missing, once even if several processes want it."""
        facts = self.facts(spec)
        if facts is not None:
            return facts
        folder = self.writable_folder()
        with self._locked(folder, spec):
            # Another process may have written it while we waited for the lock.
            facts = self.facts(spec)
            if facts is None:
                artifact = compile_one(spec)
                self._write(folder, spec, artifact)
                facts = artifact.facts
        return facts

    def writable_folder(self) -> Path:
        """The first folder that is ours and writable, made with mode 0700 if it does not exist.

        Raises:
            StoreError: there is none; the message says why not for each.
        """
        reasons = []
        for folder in self.folders:
            try:
                if not folder.exists():
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    folder.mkdir(mode=0o700, exist_ok=True)
                status = folder.stat()
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
                continue
            if not stat.S_ISDIR(status.st_mode):
                reasons.append(f"{folder}: not a folder")
            elif status.st_uid != os.geteuid():
                reasons.append(f"{folder}: owned by user {status.st_uid}, we are {os.geteuid()}")
            elif status.st_mode & _OTHERS_WRITE:
                reasons.append(f"{folder}: writable by group or others (chmod go-w {folder})")
            # The bits as well as access(), which is always granted to root.
            elif not status.st_mode & stat.S_IWUSR or not os.access(folder, os.W_OK | os.X_OK):
                reasons.append(f"{folder}: read-only")
            else:
                return folder
        raise StoreError(
            f"no folder of the store takes new artifacts ({'; '.join(reasons)}): "
            f"name one of yours in FA3_STORE (several are separated by {os.pathsep!r})"
        )

    # -- reading

    def _find(self, spec: Spec) -> tuple[Path, dict[str, Any]] | None:
        key = self.key(spec)
        for folder in self.folders:
            place = folder / key[:2] / key
            try:
                place.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if self._named:
                    raise StoreError(f"{place}: {error.strerror}; the folder must be readable for us") from error
                continue
            unsafe = self._unsafe(folder, place.parent, place, place / _SHARED_OBJECT, place / _FACTS)
            if unsafe is not None:
                if self._named:
                    raise StoreError(f"{unsafe}, and an artifact is code: chmod -R go-w {folder}")
                _log.warning("passing over the store %s: %s", folder, unsafe)
                continue
            facts = _read_whole(place)
            if facts is None:
                _log.warning("broken artifact of %s in %s: not used", spec.name, place)
                continue
            return place / _SHARED_OBJECT, facts
        return None

    def _unsafe(self, *paths: Path) -> str | None:
        """Why one of these paths must not be trusted, or None."""
        owners = {os.geteuid(), 0, _PACKAGE.stat().st_uid}
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                continue  # missing: found to be broken when read
            if status.st_mode & _OTHERS_WRITE:
                return f"{path} is writable by group or others (mode {stat.S_IMODE(status.st_mode):04o})"
            if not self._named and status.st_uid not in owners:
                return f"{path} is owned by user {status.st_uid}"
        return None

    def _open(self, path: Path, facts: dict[str, Any]) -> Callable[..., Any]:
        load_runtime_library(self.target.cuda_major)
        import tvm_ffi  # here, since only a call that reaches a kernel needs it

        try:
            function: Callable[..., Any] = tvm_ffi.load_module(str(path))[facts["symbol"]]
        except (RuntimeError, AttributeError, KeyError, OSError) as error:
            raise StoreError(f"cannot load {path}: {error}") from error
        return function

    def _compile(self, spec: Spec) -> None:
        if not dsl_installed():
            extra = CUDA_MAJORS.get(self.target.cuda_major, "hopper")
            raise CompileError(
                f"{spec.name} is not in the store ({', '.join(map(str, self.folders))}) for CUDA "
                f"{self.target.cuda_major}, and the CuTe DSL to compile it is not installed: fill a store elsewhere "
                f"with `fa3 compile --preset all --store DIR` and name it in FA3_STORE, "
                f'or pip install "fa3[{extra}]"'
            )
        from fa3.compiler.build import build

        _log.info("compiling %s", spec.name)
        self.fill(spec, lambda one: build(one, self.target))

    # -- writing

    @contextlib.contextmanager
    def _locked(self, folder: Path, spec: Spec) -> Iterator[None]:
        """Hold the lock of one key; the operating system frees it when the process dies."""
        key = self.key(spec)
        place = folder / key[:2]
        place.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(place / f".{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write(self, folder: Path, spec: Spec, artifact: Artifact) -> Path:
        """Write under the lock of the key: complete under a temporary name first, then one rename."""
        key = self.key(spec)
        parent = folder / key[:2]
        place = parent / key
        # Only the holder of the lock makes these, so what is there was left by an interrupted process.
        for leftover in parent.glob(f".tmp-{key}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=parent))  # mode 0700
        try:
            _write_synced(scratch / _SHARED_OBJECT, artifact.shared_object)
            _write_synced(scratch / _FACTS, json.dumps(artifact.facts, indent=1).encode())
            _sync_folder(scratch)
            if place.exists():
                # Broken, or found unsafe: move it away whole, a folder with content cannot be renamed over.
                os.rename(place, parent / f".tmp-{key}-old")
            os.rename(scratch, place)
            _sync_folder(parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(parent / f".tmp-{key}-old", ignore_errors=True)
        return place / _SHARED_OBJECT


def _read_whole(place: Path) -> dict[str, Any] | None:
    """Facts of the artifact in ``place`` if both files are whole, else None."""
    try:
        facts = json.loads((place / _FACTS).read_bytes())
        content = (place / _SHARED_OBJECT).read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or not isinstance(facts.get("symbol"), str):
        return None
    if facts.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    return facts


def _write_synced(path: Path, content: bytes) -> None:
    # Not the mode that the umask would give: what others may write is not loaded.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache
def default_store() -> Store:
    """The store of this process: the folders of ``FA3_STORE``, else the package's own, then the user's cache."""
    asked = os.environ.get("FA3_STORE")
    if asked:
        return Store([folder for folder in asked.split(os.pathsep) if folder])
    import platformdirs  # here, since FA3_STORE makes it unnecessary

    return Store([PACKAGE_STORE, Path(platformdirs.user_cache_dir("fa3")) / "store"], named=False)
