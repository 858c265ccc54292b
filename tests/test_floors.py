"""The shape of the house: imports run downward only, and `import fa3` stays light."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CONTRACTS = """
[tool.importlinter]
root_package = "house"
include_external_packages = true

[[tool.importlinter.contracts]]
name = "floors"
type = "layers"
layers = ["house.upper", "house.lower"]
"""


def lint_imports(folder: Path, *path: str) -> subprocess.CompletedProcess:
    command = Path(sys.executable).with_name("lint-imports")
    found = str(command) if command.exists() else shutil.which("lint-imports")
    assert found, "import-linter is not installed: it is in the extra `test`"
    return subprocess.run(
        [found, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path), "PYTHONUTF8": "1"},
        timeout=120,
    )


def test_imports_run_downward_only():
    linted = lint_imports(ROOT, str(ROOT / "src"))
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 broken" in linted.stdout


def test_the_linter_sees_an_upward_import(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "upper.py").write_text("value = 1\n")
    (package / "lower.py").write_text("from house import upper\n")
    (tmp_path / "pyproject.toml").write_text(CONTRACTS)
    assert lint_imports(tmp_path, str(tmp_path)).returncode != 0


HEAVY = ("cutlass", "tvm_ffi", "rich", "platformdirs", "matplotlib", "fa3.kernels", "fa3.cli")


@pytest.mark.parametrize("module", HEAVY)
def test_importing_fa3_does_not_bring(module):
    code = f"import sys, fa3; assert {module!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment(), timeout=120)


def test_importing_fa3_costs_at_most_100_ms_on_top_of_torch():
    code = "import torch, time; start = time.perf_counter(); import fa3; print(time.perf_counter() - start)"
    # The best of three: the machine may be busy with other things, the import itself does not get faster than it is.
    seconds = min(
        float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=_environment(), timeout=120))
        for _ in range(3)
    )
    assert seconds < 0.1


def test_package_is_marked_as_typed():
    import fa3

    assert Path(fa3.__file__).with_name("py.typed").exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}
