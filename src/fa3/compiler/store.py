"""The store: folders of artifacts, one for each (spec, sources, target).

Layout: ``<folder>/<first two of the key>/<key>/kernel.so`` beside ``facts.json``. An artifact appears by one
rename of a complete folder, so a reader sees all of it or nothing; its content hash is checked at each load.

An artifact is code. Folders that we make, parents of the store too, are ours with mode 0700. Folders that we
read must not be writable by group or others, and must be owned by us, by root or by the owner of this package,
or be named in ``FA3_STORE``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
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

from fa3.compiler.target import Target, default_target, dsl_installed, dsl_remedy, load_runtime_library
from fa3.errors import CompileError, StoreError

if TYPE_CHECKING:
    from fa3.compiler.build import Artifact, Spec

_PACKAGE = Path(__file__).resolve().parents[1]

#: Artifacts that came with the package, if any: read, never written.
PACKAGE_STORE = _PACKAGE / "artifacts"

_SHARED_OBJECT = "kernel.so"
_FACTS = "facts.json"
#: What kernels stand on: all modules of this package outside ``kernels/`` and ``compiler/`` that they import.
_GROUND = ("backward_spec.py", "e4m3.py", "kernel_spec.py", "spec.py")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

_log = logging.getLogger("fa3.store")


@functools.cache
def sources_hash() -> str:
    """SHA-256 over what decides a kernel's code: ``kernels/``, ``compiler/`` and `_GROUND`; read once a process."""
    digest = hashlib.sha256()
    folders = [path for part in ("compiler", "kernels") for path in sorted((_PACKAGE / part).rglob("*.py"))]
    for path in (*folders, *(_PACKAGE / name for name in _GROUND)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


#: Modules whose sources are in ``sources_hash`` already.
_OWN_MODS = "fa3.kernels."


def module_hash(module: str) -> str:
    """SHA-256 over the file of a module, which is found but not imported (its packages are).

    Raises:
        StoreError: there is no such module here, or it has no file.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise StoreError(f"module {module}, which has a function for a kernel, cannot be found: {error}") from error
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise StoreError(f"module {module}, which has a function for a kernel, cannot be found, or has no file")
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def _foreign_mods(fields: dict[str, Any]) -> list[str]:
    """Names of the modifications of a spec whose sources are the caller's."""
    mods = [name for field in ("score_mod", "derivative", "mask_mod") if (name := fields.get(field))]
    return [name for name in mods if not name.startswith(_OWN_MODS)]


class Store:
    """Stacked folders of artifacts, first hit wins; the first one that is ours and writable takes new ones.

    Args:
        folders: folders to look in, in this order. They need not exist; ``~`` is the user's home.
        target: what the artifacts are for; the default is this machine.
        named: True if the user chose these folders, so that any owner is fine and an unsafe one is an error;
            False for default places, where an unsafe or foreign folder is passed over.
        read_only: folders to look in before these, and never to write to.

    Raises:
        StoreError: no folder is given, or one begins with the ``~`` of a user who does not exist.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        target: Target | None = None,
        named: bool = True,
        read_only: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        if not folders:
            raise StoreError("a store needs at least one folder: see FA3_STORE")
        self._takes_new = _expanded(folders)
        self.read_only = _expanded(read_only)
        self.folders = self.read_only + self._takes_new
        self.target = default_target() if target is None else target
        self._named = named
        self._loaded: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._spec_locks: dict[Spec, threading.Lock] = {}

    def for_target(self, target: Target) -> Store:
        """The same folders, for artifacts of another target."""
        return Store(self._takes_new, target, self._named, self.read_only)

    def key(self, spec: Spec) -> str:
        """64 hex digits: SHA-256 over the spec, the sources that decide its code, and the target."""
        fields = spec.as_dict()
        identity = {"spec": fields, "sources": sources_hash(), "target": self.target.as_dict()}
        foreign = {name: module_hash(name.partition(":")[0]) for name in _foreign_mods(fields)}
        if foreign:
            identity["mods"] = foreign
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
        # The file of a caller's own modification may have changed since: then it is another kernel.
        known = self.key(spec) if _foreign_mods(spec.as_dict()) else spec
        function = self._loaded.get(known)
        if function is not None:
            return function
        with self._lock:
            lock = self._spec_locks.setdefault(spec, threading.Lock())
        # A lock for each spec: a thread that finds its artifact does not wait for another's compilation.
        with lock:
            if known not in self._loaded:
                found = self._find(spec)
                if found is None:
                    self._compile(spec)
                    found = self._find(spec)
                    if found is None:
                        raise StoreError(f"{spec.name}: compiled, but broken when read back from {self.folders}")
                self._loaded[known] = self._open(*found)
            return self._loaded[known]

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

    def writable_folder(self, make: bool = True) -> Path:
        """The first folder that is ours and writable; ``make`` it, with mode 0700, if it does not exist.

        Raises:
            StoreError: there is none; the message says why not for each.
        """
        reasons = []
        for folder in self._takes_new:
            try:
                if make:
                    _make_folders(folder)
                reason = _why_not_writable(folder)
            except OSError as error:
                reason = error.strerror or str(error)
            if reason is None:
                return folder
            reasons.append(f"{folder}: {reason}")
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
            except OSError as error:
                if self._named and error.errno not in _NOT_THERE:
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
            if not self._is_for(facts, spec):
                # Its key says what it should be; a kernel of another spec would compute something else.
                _log.warning("%s holds an artifact of %s, not of %s: not used", place, facts.get("name"), spec.name)
                continue
            return place / _SHARED_OBJECT, facts
        return None

    def _is_for(self, facts: dict[str, Any], spec: Spec) -> bool:
        asked = json.loads(json.dumps({"spec": spec.as_dict(), "target": self.target.as_dict()}))
        return {name: facts.get(name) for name in asked} == asked

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
            raise CompileError(
                f"{spec.name} is not in the store ({', '.join(map(str, self.folders))}) for CUDA "
                f"{self.target.cuda_major}, and the CuTe DSL to compile it is not installed: fill a store elsewhere "
                f"with `fa3 compile --preset all --store DIR` and name it in FA3_STORE, "
                f"or {dsl_remedy(self.target.cuda_major)}"
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
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(place / f".{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot write {place}: {error.strerror}; it must be a folder of ours") from error
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
        old = parent / f".tmp-{key}-old"
        try:
            # Only the holder of the lock makes these, so what is there was left by an interrupted process.
            for leftover in parent.glob(f".tmp-{key}-*"):
                _remove(leftover)
            scratch = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=parent))  # mode 0700
            try:
                _write_synced(scratch / _SHARED_OBJECT, artifact.shared_object)
                _write_synced(scratch / _FACTS, json.dumps(artifact.facts, indent=1).encode())
                _sync_folder(scratch)
                if os.path.lexists(place):
                    # Broken, unsafe or no folder at all: away with it whole, since a folder can be renamed
                    # over an empty folder only.
                    os.rename(place, old)
                os.rename(scratch, place)
                _sync_folder(parent)
            finally:
                _remove(scratch)
                _remove(old)
        except OSError as error:
            raise StoreError(f"cannot write {place}: {error.strerror}") from error
        return place / _SHARED_OBJECT


def _expanded(folders: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    try:
        return tuple(Path(folder).expanduser() for folder in folders)
    except RuntimeError as error:  # no such user
        raise StoreError(f"store {os.pathsep.join(map(str, folders))}: {error}") from error


def _make_folders(folder: Path) -> None:
    # One by one: Path.mkdir(parents=True) gives parents whatever mode the umask leaves.
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def _why_not_writable(folder: Path) -> str | None:
    """Why no artifact can be written to ``folder``, or None; of one that does not exist its nearest parent counts."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    status = existing.stat()
    name = "not a folder" if existing == folder else f"{existing} is not a folder"
    if not stat.S_ISDIR(status.st_mode):
        return name
    if existing == folder and status.st_uid != os.geteuid():
        return f"owned by user {status.st_uid}, we are {os.geteuid()}"
    if existing == folder and status.st_mode & _OTHERS_WRITE:
        return f"writable by group or others (chmod go-w {folder})"
    # The bits as well as access(), which is always granted to root.
    own_bits = existing != folder or status.st_mode & stat.S_IWUSR
    if not own_bits or not os.access(existing, os.W_OK | os.X_OK):
        return "read-only" if existing == folder else f"{existing} is read-only"
    return None


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link, if it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


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
    """The store of this process: the folders of ``FA3_STORE``, else the package's own, then the user's cache.

    The package's own is read only: what is installed is not for a running program to change.
    """
    asked = os.environ.get("FA3_STORE")
    if asked:
        return Store([folder for folder in asked.split(os.pathsep) if folder])
    import platformdirs  # here, since FA3_STORE makes it unnecessary

    return Store([Path(platformdirs.user_cache_dir("fa3")) / "store"], named=False, read_only=[PACKAGE_STORE])
