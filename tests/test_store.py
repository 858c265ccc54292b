"""The store: keys, permissions, locks, broken artifacts. No compiler is needed here."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from fa3.backward_spec import BackwardSpec
from fa3.compiler import store as store_module
from fa3.compiler.build import Artifact
from fa3.compiler.store import Store, default_store
from fa3.compiler.target import Target
from fa3.errors import CompileError, StoreError
from fa3.presets import shipped_specs
from fa3.spec import ForwardSpec
from toy_kernels import ToySpec

SPEC = ToySpec()
TARGET = Target(cuda_major=13)


def artifact(content: bytes = b"code", spec: ToySpec = SPEC, target: Target = TARGET) -> Artifact:
    facts = {
        "name": spec.name,
        "spec": spec.as_dict(),
        "target": target.as_dict(),
        "symbol": "toy",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return Artifact(content, facts)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store([tmp_path / "store"], TARGET)


def test_what_is_put_is_found_with_its_facts(store: Store) -> None:
    assert store.find(SPEC) is None
    path = store.put(SPEC, artifact())
    assert store.find(SPEC) == path
    assert path.read_bytes() == b"code"
    assert store.facts(SPEC) == artifact().facts


def test_the_key_depends_on_spec_target_and_sources(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.key(SPEC)
    assert key == store.key(ToySpec())
    others = {
        store.key(ToySpec(threads=64)),
        store.for_target(Target(cuda_major=12)).key(SPEC),
        store.for_target(Target(cuda_major=13, host="aarch64")).key(SPEC),
        store.for_target(Target(cuda_major=13, tvm_ffi_abi="0.2")).key(SPEC),
    }
    monkeypatch.setattr(store_module, "sources_hash", lambda: "another source")
    others.add(store.key(SPEC))
    assert len(others) == 5
    assert key not in others


def test_the_sources_hash_sees_kernels_compiler_and_ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PACKAGE", tmp_path)
    ground = ("backward_spec.py", "e4m3.py", "kernel_spec.py", "spec.py")
    for name in ground:
        (tmp_path / name).write_text("0")
    hashes = set()
    for name in ("kernels/a.py", "kernels/parts/b.py", "compiler/c.py", *ground):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        for text in ("1", "2"):
            (tmp_path / name).write_text(text)
            hashes.add(store_module.sources_hash.__wrapped__())
    assert len(hashes) == 14
    (tmp_path / "plan.py").write_text("no part of the key")
    assert store_module.sources_hash.__wrapped__() in hashes


def test_the_sources_hash_sees_every_module_that_kernels_import() -> None:
    package = Path(store_module.__file__).parents[1]
    waiting, imported = set((package / "kernels").rglob("*.py")), set()
    while waiting:
        source = waiting.pop().read_text()
        for name in re.findall(r"^ *(?:from|import) fa3\.(\w+)", source, re.MULTILINE):
            if f"{name}.py" not in imported and name != "kernels":
                imported.add(f"{name}.py")
                waiting.add(package / f"{name}.py")
    assert imported == set(store_module._GROUND)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a module, and a package with one."""
    folder = tmp_path / "modules"
    (folder / "callers").mkdir(parents=True)
    (folder / "callers" / "__init__.py").write_text("")
    # Found, never imported: a machine without the DSL has a key for them too.
    (folder / "callers" / "scores.py").write_text("raise ImportError('no DSL here')")
    (folder / "callers_mask.py").write_text("raise ImportError('no DSL here')")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder
    # Packages are imported to look for a module in them.
    sys.modules.pop("callers", None)


def modified(**changes: str) -> ForwardSpec:
    (plain,) = shipped_specs("smoke")
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("field", "name", "file"),
    [("score_mod", "callers.scores:f", "callers/scores.py"), ("mask_mod", "callers_mask:f", "callers_mask.py")],
)
def test_the_key_depends_on_the_file_of_a_callers_modification(
    store: Store, modules: Path, field: str, name: str, file: str
) -> None:
    spec = modified(**{field: name})
    path, key = modules / file, store.key(spec)
    before = path.read_text()
    path.write_text(before + "# changed")
    assert store.key(spec) != key
    path.write_text(before)
    assert store.key(spec) == key
    for other in modules.rglob("*.py"):
        if other != path:
            other.write_text("# changed")
    assert store.key(spec) == key
    assert store.key(modified(**{field: name.replace(":f", ":g")})) != key


def test_a_change_of_one_of_two_modifications_changes_the_key(store: Store, modules: Path) -> None:
    spec = modified(score_mod="callers.scores:f", mask_mod="callers_mask:f")
    keys = {store.key(spec)}
    for file in ("callers/scores.py", "callers_mask.py"):
        (modules / file).write_text("# changed")
        keys.add(store.key(spec))
    assert len(keys) == 3


def test_the_key_depends_on_the_file_of_a_callers_derivative(store: Store, modules: Path) -> None:
    mods = {"score_mod": "callers.scores:f", "derivative": "callers_mask:f"}
    spec = BackwardSpec("bf16", 64, 64, "full", 64, 128, 2, 2, **mods)
    keys = {store.key(spec)}
    for file in ("callers/scores.py", "callers_mask.py"):
        (modules / file).write_text("# changed")
        keys.add(store.key(spec))
    assert len(keys) == 3


def test_an_artifact_of_a_modification_that_has_changed_is_not_found(store: Store, modules: Path) -> None:
    spec = modified(score_mod="callers_mask:f")
    facts = {**artifact().facts, "name": spec.name, "spec": spec.as_dict()}
    path = store.put(spec, Artifact(b"code", facts))
    assert store.find(spec) == path
    (modules / "callers_mask.py").write_text("# changed")
    assert store.find(spec) is None


@pytest.mark.parametrize(
    "module", ["no_such_module", "no_such_package.scores", "callers.no_such_module", "sys", "empty"]
)
def test_a_modification_whose_file_cannot_be_found_is_named(store: Store, modules: Path, module: str) -> None:
    (modules / "empty").mkdir()  # a package without a file
    importlib.invalidate_caches()
    with pytest.raises(StoreError, match=rf"module {module}, which has a function for a kernel, cannot be found"):
        store.key(modified(mask_mod=f"{module}:f"))


def test_ready_made_modifications_are_among_the_sources_already(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "module_hash", lambda module: pytest.fail(f"read {module}"))
    keys = {store.key(spec) for spec in shipped_specs("features")}
    assert len(keys) == len(shipped_specs("features"))


def test_new_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    store = Store([tmp_path / "deep" / "deeper" / "store"], TARGET)
    before = os.umask(0)
    try:
        path = store.put(SPEC, artifact())
    finally:
        os.umask(before)
    for folder in list(path.parents)[: len(path.parents) - len(tmp_path.parents) - 1]:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert store.find(SPEC) == path


@pytest.mark.parametrize("part", ["store", "prefix", "artifact", "kernel.so", "facts.json"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_not_loaded(store: Store, part: str, mode: int) -> None:
    path = store.put(SPEC, artifact())
    place = path.parent
    changed = {
        "store": store.folders[0],
        "prefix": place.parent,
        "artifact": place,
        "kernel.so": path,
        "facts.json": place / "facts.json",
    }[part]
    changed.chmod(stat.S_IMODE(changed.stat().st_mode) | mode)
    with pytest.raises(StoreError, match=r"writable by group or others.*chmod -R go-w"):
        store.find(SPEC)
    # A default folder is passed over instead: nobody chose it.
    assert Store(store.folders, TARGET, named=False).find(SPEC) is None


def test_a_foreign_default_folder_is_passed_over_and_a_named_one_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.put(SPEC, artifact())
    owner = path.stat().st_uid
    if owner == 0:
        for each in (store.folders[0], path.parent.parent, path.parent, path, path.with_name("facts.json")):
            os.chown(each, 12345, 12345)
    else:
        monkeypatch.setattr(store_module, "_PACKAGE", Path("/"))
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert Store(store.folders, TARGET, named=False).find(SPEC) is None
    assert store.find(SPEC) == path
    with pytest.raises(StoreError, match="owned by user"):
        store.writable_folder()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no facts", "half facts", "facts of no dict", "no code"])
def test_a_broken_artifact_is_never_found_and_is_replaced(store: Store, damage: str) -> None:
    path = store.put(SPEC, artifact())
    facts = path.with_name("facts.json")
    if damage == "truncated":
        path.write_bytes(b"co")
    elif damage == "flipped":
        path.write_bytes(b"cOde")
    elif damage == "no facts":
        facts.unlink()
    elif damage == "half facts":
        facts.write_bytes(facts.read_bytes()[:20])
    elif damage == "facts of no dict":
        facts.write_text("[]")
    else:
        path.unlink()
    assert store.find(SPEC) is None
    built = []

    def compile_one(spec: ToySpec) -> Artifact:
        built.append(spec)
        return artifact()

    assert store.fill(SPEC, compile_one) == artifact().facts
    assert built == [SPEC]
    assert store.find(SPEC) == path
    assert [entry.name for entry in path.parent.parent.iterdir() if "tmp" in entry.name] == []


@pytest.mark.parametrize("what", ["file", "dangling link", "link to a file", "link in a circle", "link to a folder"])
def test_what_is_no_folder_in_the_place_of_an_artifact_is_replaced(store: Store, tmp_path: Path, what: str) -> None:
    place = store.put(SPEC, artifact()).parent
    shutil.rmtree(place)
    elsewhere = tmp_path / "elsewhere"
    if what == "file":
        place.write_text("")
    else:
        place.symlink_to(place if what == "link in a circle" else elsewhere)
    if what == "link to a file":
        elsewhere.write_text("kept")
    elif what == "link to a folder":
        elsewhere.mkdir()
        (elsewhere / "note").write_text("kept")
    assert store.find(SPEC) is None
    assert store.fill(SPEC, lambda spec: artifact()) == artifact().facts
    assert store.find(SPEC) == place / "kernel.so"
    assert not place.is_symlink()
    kept = {"link to a file": elsewhere, "link to a folder": elsewhere / "note"}.get(what)
    assert kept is None or kept.read_text() == "kept"
    assert [entry.name for entry in place.parent.iterdir() if "tmp" in entry.name] == []


def test_a_file_in_the_place_of_a_prefix_is_named(store: Store) -> None:
    store.writable_folder()
    prefix = store.folders[0] / store.key(SPEC)[:2]
    prefix.write_text("")
    with pytest.raises(StoreError, match=rf"{prefix}.*must be a folder"):
        store.put(SPEC, artifact())


@pytest.mark.parametrize(
    "other",
    [
        artifact(spec=ToySpec(threads=64)),
        artifact(target=Target(cuda_major=12)),
        Artifact(b"code", {"symbol": "toy", "sha256": hashlib.sha256(b"code").hexdigest()}),
    ],
    ids=["another spec", "another target", "of nobody knows what"],
)
def test_an_artifact_of_something_else_under_this_key_is_not_used(store: Store, other: Artifact) -> None:
    store.put(SPEC, other)
    assert store.find(SPEC) is None
    assert store.fill(SPEC, lambda spec: artifact()) == artifact().facts
    assert store.facts(SPEC) == artifact().facts


def test_a_broken_artifact_in_a_first_folder_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    first, second = Store([tmp_path / "a"], TARGET), Store([tmp_path / "b"], TARGET)
    first.put(SPEC, artifact()).write_bytes(b"broken")
    whole = second.put(SPEC, artifact())
    assert Store([tmp_path / "a", tmp_path / "b"], TARGET).find(SPEC) == whole


def test_stacked_folders_are_read_in_order_and_the_first_writable_one_is_written(tmp_path: Path) -> None:
    shipped = Store([tmp_path / "shipped"], TARGET)
    path = shipped.put(SPEC, artifact())
    (tmp_path / "shipped").chmod(0o500)
    stacked = Store([tmp_path / "shipped", tmp_path / "own"], TARGET)
    assert stacked.find(SPEC) == path
    other = ToySpec(threads=64)
    assert (tmp_path / "own") in stacked.put(other, artifact(spec=other)).parents
    (tmp_path / "shipped").chmod(0o700)


def test_a_store_without_a_writable_folder_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "fixed").mkdir(mode=0o500)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError) as caught:
        Store([tmp_path / "file", tmp_path / "fixed", tmp_path / "open"], TARGET).put(SPEC, artifact())
    for reason in ("file: not a folder", "fixed: read-only", "open: writable by group or others", "FA3_STORE"):
        assert reason in str(caught.value)


def test_a_read_only_store_is_read_without_a_lock(store: Store) -> None:
    path = store.put(SPEC, artifact())
    for lock in path.parent.parent.glob(".*.lock"):
        lock.unlink()
    folders = (path.parent, path.parent.parent, store.folders[0])
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert store.fill(SPEC, lambda spec: pytest.fail("compiled again")) == artifact().facts
        assert list(path.parent.parent.iterdir()) == [path.parent]
    finally:
        for folder in folders:
            folder.chmod(0o755)


def _fill_slowly(folder: Path, log: Path, started: Barrier) -> None:
    # Neither begins before both can: a process that starts late would find the artifact even without a lock.
    started.wait(60)

    def compile_one(spec: ToySpec) -> Artifact:
        with log.open("a") as file:
            file.write("compiled\n")
        time.sleep(0.3)
        return artifact()

    Store([folder], TARGET).fill(SPEC, compile_one)


def test_two_processes_that_want_the_same_kernel_compile_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    started = context.Barrier(2)
    processes = [context.Process(target=_fill_slowly, args=(tmp_path / "store", log, started)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "compiled\n"


INTERRUPTED = """
import os, signal, sys
from fa3.compiler import store as module
from test_store import SPEC, TARGET, artifact
def stop(folder):
    os.kill(os.getpid(), signal.SIGKILL)
module._sync_folder = stop
module.Store([sys.argv[1]], TARGET).put(SPEC, artifact(b"half"))
"""


def test_a_process_killed_while_it_writes_leaves_the_store_whole(store: Store) -> None:
    other = ToySpec(threads=64)
    store.put(other, artifact(spec=other))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(store_module.__file__).parents[2])])
    killed = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(store.folders[0])], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert killed.returncode == -9
    place = store.folders[0] / store.key(SPEC)[:2]
    assert list(place.glob(".tmp-*")), "the process was to be killed between writing and renaming"
    assert store.find(SPEC) is None
    assert store.find(other) is not None
    # Its lock went with it, and the next one tidies up.
    assert store.fill(SPEC, lambda spec: artifact()) == artifact().facts
    assert not list(place.glob(".tmp-*"))


def test_an_exception_while_compiling_leaves_nothing_behind_and_frees_the_lock(store: Store) -> None:
    def interrupted(spec: ToySpec) -> Artifact:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fill(SPEC, interrupted)
    assert store.find(SPEC) is None
    (lock,) = (store.folders[0] / store.key(SPEC)[:2]).iterdir()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_artifact_and_compiler_the_error_names_spec_folders_and_remedies(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "dsl_installed", lambda: False)
    with pytest.raises(CompileError) as caught:
        store.load(SPEC)
    for part in (
        SPEC.name,
        str(store.folders[0]),
        "fa3 compile",
        "FA3_STORE",
        'pip install "nvidia-cutlass-dsl[cu13]==4.8.*"',
    ):
        assert part in str(caught.value)


def test_fa3_store_names_the_folders_and_spares_platformdirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA3_STORE", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    default_store.cache_clear()
    try:
        assert default_store().folders == (tmp_path / "a", tmp_path / "b")
    finally:
        default_store.cache_clear()


def test_without_fa3_store_the_package_comes_before_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA3_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    default_store.cache_clear()
    try:
        assert default_store().folders == (store_module.PACKAGE_STORE, Path("/somewhere/fa3/store"))
    finally:
        default_store.cache_clear()


def test_a_write_goes_to_the_users_cache_and_never_into_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "installed" / "artifacts"
    monkeypatch.setattr(store_module, "PACKAGE_STORE", shipped)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    default_store.cache_clear()
    assert tmp_path / "cache" in default_store().for_target(TARGET).put(SPEC, artifact()).parents
    assert not shipped.parent.exists()
    # A package that has artifacts, in a folder that we could write: they are read first, and still not added to.
    own = ToySpec(threads=64)
    in_package = Store([shipped], TARGET).put(own, artifact(spec=own))
    store = default_store().for_target(TARGET)
    assert store.find(own) == in_package
    assert tmp_path / "cache" in store.put(own, artifact(b"new", own)).parents
    assert in_package.read_bytes() == b"code"
    default_store.cache_clear()


def test_looking_for_a_writable_folder_makes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "store"
    assert Store([folder], TARGET).writable_folder(make=False) == folder
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is not a folder"):
        Store([tmp_path / "file" / "store"], TARGET).writable_folder(make=False)


def test_a_tilde_in_fa3_store_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FA3_STORE", os.pathsep.join(["~/a", "~nobody-of-this-name/b"]))
    default_store.cache_clear()
    with pytest.raises(StoreError, match="~nobody-of-this-name"):
        default_store()
    monkeypatch.setenv("FA3_STORE", "~/a")
    assert default_store().folders == (tmp_path / "a",)
    default_store.cache_clear()


def test_facts_are_plain_json_beside_the_code(store: Store) -> None:
    path = store.put(SPEC, artifact())
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["facts.json", "kernel.so"]
    assert json.loads(path.with_name("facts.json").read_text()) == artifact().facts


def test_a_modification_that_has_changed_is_loaded_anew(
    store: Store, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = modified(score_mod="callers_mask:f")
    facts = {**artifact().facts, "name": spec.name, "spec": spec.as_dict()}
    monkeypatch.setattr(store, "_open", lambda path, *_: path)
    store.put(spec, Artifact(b"code", facts))
    first = store.load(spec)
    assert store.load(spec) is first
    (modules / "callers_mask.py").write_text("# changed")
    store.put(spec, Artifact(b"code", facts))
    assert store.load(spec) != first
