"""What `make setup` installs on a machine that lacks it, on a machine made of stand-ins."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: A Python that can do everything; `-m venv` puts another one into the environment.
PYTHON = """#!/bin/bash
case "$*" in
    "-m venv"*) /bin/mkdir -p "${@: -1}/bin"; /bin/cp "$0" "${@: -1}/bin/python";;
    *ensurepip*) [ -z "$NO_VENV" ];;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Run `make setup` where these commands are all that there is, as this user; what apt-get was asked for."""

    def run(commands, user=0, no_venv=""):
        folder = tmp_path / "bin"
        folder.mkdir()
        scripts = {"python3": PYTHON, "id": f"#!/bin/bash\necho {user}\n"}
        scripts["apt-get"] = f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\n'
        scripts["touch"] = '#!/bin/bash\n: >"$1"\n'
        for name, script in {**scripts, **dict.fromkeys(commands, "#!/bin/bash\n")}.items():
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        make = next(path for path in map(Path, ("/usr/bin/make", "/usr/local/bin/make", "/bin/make")) if path.exists())
        done = subprocess.run(
            [make, "-C", ROOT, f"VENV={tmp_path}/venv", "setup"],
            env={"PATH": str(folder), "NO_VENV": no_venv, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        asked = tmp_path / "asked"
        return done, asked.read_text().splitlines() if asked.exists() else []

    assert os.access("/bin/bash", os.X_OK)
    return run


@pytest.mark.parametrize("compiler", ["cc", "gcc", "clang"])
def test_with_a_compiler_and_venv_nothing_is_installed(setup, compiler):
    done, asked = setup([compiler])
    assert done.returncode == 0, done.stderr
    assert asked == []


def test_root_gets_what_is_missing(setup):
    done, asked = setup([], no_venv="yes")
    assert done.returncode == 0, done.stderr
    assert asked == ["update -qq", "install -y -qq python3-venv gcc libc6-dev"]


def test_without_a_compiler_another_user_is_told_and_goes_on(setup):
    done, asked = setup([], user=1000)
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert "install gcc" in done.stderr


def test_without_venv_another_user_is_told_and_stops(setup):
    done, asked = setup(["gcc"], user=1000, no_venv="yes")
    assert done.returncode != 0
    assert asked == []
    assert "install the package python3-venv" in done.stderr
