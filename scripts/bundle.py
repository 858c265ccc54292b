"""Bundle for a GPU machine without a compiler and without a network.

Makes a folder with compiled kernels, tvm-ffi, the DSL's one runtime library (packed) and ``env.sh``, which
sets up a shell there:

    python scripts/bundle.py --out .gpu --preset forward --python 3.12
    # then, on the GPU machine, in the repository root:
    source .gpu/env.sh && python -c "import fa3"

The runtime library belongs to NVIDIA: a bundle is for one's own machines, not for publishing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from fa3.cli import compile as compile_command  # noqa: E402
from fa3.compiler.target import RUNTIME_LIBRARY, runtime_library, target_for  # noqa: E402

#: Largest bundle that still travels easily, in bytes.
SIZE_LIMIT = 60_000_000

#: Parts of unpacked wheels that nothing reads at run time.
NOT_NEEDED = ("/3rdparty/", "/include/")

ENVIRONMENT = """\
# Sets up this shell for fa3 from the bundle beside this file: source it.
fa3_bundle="$(cd "$(dirname "${{BASH_SOURCE[0]:-$0}}")" && pwd)"
# A copy may have lost the modes, and artifacts that others can write are not loaded.
chmod -R u+rwX,go-w "$fa3_bundle/store"
fa3_runtime="${{FA3_BUNDLE_SCRATCH:-$fa3_bundle/lib}}"
mkdir -p "$fa3_runtime"
if [ ! -s "$fa3_runtime/{library}" ]; then
    "${{PYTHON:-python3}}" - "$fa3_bundle/lib/{library}.xz" "$fa3_runtime/{library}" <<'UNPACK'
import lzma, os, shutil, sys
part = f"{{sys.argv[2]}}.{{os.getpid()}}"
with lzma.open(sys.argv[1]) as packed, open(part, "wb") as out:
    shutil.copyfileobj(packed, out, 1 << 20)
os.rename(part, sys.argv[2])
UNPACK
fi
export PYTHONPATH="$(cd "$fa3_bundle/{source}" && pwd):$fa3_bundle/site${{PYTHONPATH:+:$PYTHONPATH}}"
export FA3_STORE="$fa3_bundle/store"
export FA3_CUTE_RUNTIME="$fa3_runtime/{library}"
export FA3_CUDA={cuda_major}
unset fa3_bundle fa3_runtime
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make or to bring up to date")
    parser.add_argument("--preset", default="forward", help="which specs to compile; 'none' compiles nothing")
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine")
    parser.add_argument("--cuda", type=int, choices=(12, 13), help="CUDA major; default: newest installed")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    parser.add_argument(
        "--wheel", action="append", default=[], metavar="NAME[==VERSION]", help="another package, unpacked into site"
    )
    parser.add_argument(
        "--keep-wheel", action="append", default=[], metavar="NAME[==VERSION]", help="another package, as a wheel file"
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    target = target_for(arguments.cuda)

    if arguments.preset != "none":
        command = ["--preset", arguments.preset, "--store", str(out / "store"), "-j", str(arguments.jobs)]
        command += ["--cuda", str(target.cuda_major)]
        compile_parser = argparse.ArgumentParser()
        compile_command.add_arguments(compile_parser)
        failed = compile_command.run(compile_parser.parse_args(command))
        if failed:
            return failed
    else:
        (out / "store").mkdir(parents=True, exist_ok=True)

    tvm_ffi = f"apache-tvm-ffi=={importlib.metadata.version('apache-tvm-ffi')}"
    for requirement in [tvm_ffi, *arguments.wheel]:
        add_package(requirement, arguments.python, out / "site", unpack=True)
    for requirement in arguments.keep_wheel:
        add_package(requirement, arguments.python, out / "wheels", unpack=False)
    pack(runtime_library(target.cuda_major), out / "lib" / f"{RUNTIME_LIBRARY}.xz")

    source = os.path.relpath(ROOT / "src", out)
    (out / "env.sh").write_text(
        ENVIRONMENT.format(library=RUNTIME_LIBRARY, source=source, cuda_major=target.cuda_major)
    )
    files = [path for path in out.rglob("*") if path.is_file() and path.name != RUNTIME_LIBRARY]
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB; on the GPU machine: source {out}/env.sh")
    if size > SIZE_LIMIT:
        print(f"larger than {SIZE_LIMIT / 1e6:.0f} MB: choose a smaller preset or fewer wheels", file=sys.stderr)
        return 1
    return 0


def add_package(requirement: str, python: str, folder: Path, unpack: bool) -> None:
    """Fetch the wheel of one package, without what it depends on, for the Python of the GPU machine."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / f".{requirement.replace('/', '_')}-{python}"
    if stamp.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        # Every platform tag up to glibc 2.28: pip takes only those that are named.
        tags = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + ["manylinux2014_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={scratch}"]
        command += [f"--platform={tag}" for tag in tags]
        subprocess.run([*command, requirement], check=True)
        for wheel in Path(scratch).glob("*.whl"):
            if unpack:
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if not any(part in name for part in NOT_NEEDED)]
                    archive.extractall(folder, names)
            else:
                shutil.copy2(wheel, folder)
    stamp.touch()


def pack(library: Path, packed: Path) -> None:
    """Compress the runtime library, unless it is there already: it takes half a minute."""
    stamp = packed.with_suffix(".size")
    size = f"{library.parent.parent.name} {library.stat().st_size}"
    if packed.exists() and stamp.exists() and stamp.read_text() == size:
        return
    packed.parent.mkdir(parents=True, exist_ok=True)
    part = packed.with_suffix(".part")
    with library.open("rb") as raw, lzma.open(part, "wb", preset=6) as out:
        shutil.copyfileobj(raw, out, 1 << 20)
    part.rename(packed)
    stamp.write_text(size)
    # An unpacked one of another flavour must not be taken for this one.
    packed.with_suffix("").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
