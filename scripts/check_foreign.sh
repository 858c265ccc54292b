#!/bin/bash
# Proof that artifacts do not lean on the machine that compiled them: they load, and `fa3 explain` works,
#   - in another environment, where cutlass cannot be imported but torch and tvm-ffi can,
#   - with the DSL's one runtime library copied elsewhere, and the CUDA toolkit and C compilers out of PATH,
#   - as another user, from a store that is read-only and belongs to root (when run as root),
#   - from a copy of the package in another place.
# Usage: [PYTHON=python-with-everything] scripts/check_foreign.sh [FILLED-STORE]
# Without a store one is filled with the smoke preset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
store=${1:-}

there=$(mktemp -d)
trap 'chmod -R u+w "$there"; rm -rf "$there"' EXIT
chmod 755 "$there"

if [ -z "$store" ]; then
    PYTHONPATH=src "$python" -m fa3 compile --preset smoke --store "$there/filled"
    store=$there/filled
fi

site=$there/site
mkdir "$site"
# Links to all packages but the compiler: torch is too large to install a second time.
"$python" - "$site" <<'LINK'
import os, pathlib, sys, sysconfig
compiler = ("nvidia_cutlass_dsl", "cutlass", "iket", "fa3", "__editable__", "_fa3", "cuda", "nvidia")
for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
    for entry in pathlib.Path(folder).iterdir():
        # .pth files bring the compiler and editable installs back.
        if not entry.name.startswith(compiler) and entry.suffix != ".pth":
            (pathlib.Path(sys.argv[1]) / entry.name).symlink_to(entry)
LINK
mkdir "$there/fa3" "$there/runtime"
cp -r src/fa3 "$there/fa3/"
runtime=$(PYTHONPATH=src "$python" -c 'from fa3.compiler.target import *; print(runtime_library(default_target().cuda_major))')
cuda=$(PYTHONPATH=src "$python" -c 'from fa3.compiler.target import *; print(default_target().cuda_major)')
cp "$runtime" "$there/runtime/"
cp -rL "$store" "$there/store"
chmod -R a+rX,a-w "$there/store"
chmod -R a+rX "$there/fa3" "$there/runtime" "$site"

as_other=()
if [ "$(id -u)" = 0 ]; then
    chown -R root "$there/store"
    as_other=(setpriv --reuid=65534 --regid=65534 --clear-groups)
else
    echo 'check_foreign: not root, so the part with another user and a store owned by root is left out' >&2
fi

# -S: no site-packages at all, only what PYTHONPATH names. env comes between setpriv and the interpreter because
# setpriv still has root's rights when it starts its command.
run_there() {
    (cd / && "${as_other[@]}" env -i PATH=/nonexistent HOME=/nonexistent LANG=C.UTF-8 PYTHONPATH="$there/fa3:$site" \
        PYTHONDONTWRITEBYTECODE=1 FA3_STORE="$there/store" FA3_CUTE_RUNTIME="$there/runtime" FA3_CUDA="$cuda" \
        "$interpreter" -S "$@")
}

# The other user may not reach a Python in root's home: then the system's one of the same version.
found=
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for interpreter in "$("$python" -c 'import sys; print(sys._base_executable)')" {/usr,/usr/local}/bin/"python$version"; do
    if [ -x "$interpreter" ] && run_there -c 'import torch, tvm_ffi' 2>"$there/why"; then
        found=yes
        break
    fi
done
if [ -z "$found" ]; then
    cat "$there/why" >&2
    echo "check_foreign: no Python $version that user ${as_other[*]:+65534 }can run with the packages of $python" >&2
    exit 1
fi

run_there - <<'LOAD'
import importlib.util, os, shutil
for module in ("cutlass", "nvidia_cutlass_dsl"):
    assert importlib.util.find_spec(module) is None, f"{module} can be imported: this proves nothing"
for tool in ("gcc", "cc", "nvcc", "ptxas", "cuobjdump", "nvdisasm"):
    assert shutil.which(tool) is None, f"{tool} is in PATH: this proves nothing"
from fa3.compiler.store import default_store
from fa3.errors import CompileError, StoreError
from fa3.presets import shipped_specs
store = default_store()
specs = [spec for spec in shipped_specs("all") if store.find(spec) is not None]
assert specs, f"no artifact of this version in {store.folders}"
for spec in specs:
    function = store.load(spec)
    try:
        function()  # no arguments: the host code runs and says what it wants
    except TypeError:
        pass
    else:
        raise AssertionError(f"{spec.name} took a call without arguments")
owner = store.folders[0].stat().st_uid
if owner != os.geteuid():
    try:
        store.writable_folder()
    except StoreError as error:
        assert "owned by user" in str(error), error
missing = [spec for spec in shipped_specs("all") if spec not in specs]
if missing:
    try:
        store.load(missing[0])
    except CompileError as error:
        assert missing[0].name in str(error), error
    else:
        raise AssertionError(f"{missing[0].name} was loaded from nowhere")
print(f"check_foreign: {len(specs)} artifacts load as user {os.geteuid()} from a store of user {owner}, without cutlass")
LOAD
run_there -m fa3 explain --shape 1,1024,16,128 | tee "$there/explained" | grep 'artifact'
if ! grep -q 'artifact: in the store' "$there/explained"; then
    cat "$there/explained"
    echo 'check_foreign: explain does not see the artifact' >&2
    exit 1
fi
echo 'check_foreign: passed'
