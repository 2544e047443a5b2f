#!/usr/bin/env bash
# Builds the distributions, checks them, installs the wheel into an environment without this checkout,
# and runs the demo's job there. What the demo writes is in out/wheel/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD out=$PWD/out/wheel
rm -rf "$out" && mkdir -p "$out/job"

.venv/bin/python -m pip install -q build twine
.venv/bin/python -m build --outdir "$out/dist" >"$out/build.log" 2>&1 || { tail -20 "$out/build.log" >&2; exit 1; }
.venv/bin/python -m twine check --strict "$out"/dist/*

${PYTHON:-python3} -m venv "$out/venv"
pip="$out/venv/bin/python -m pip --disable-pip-version-check --no-input"
$pip install -q torch==2.13.0
$pip install -q --no-deps -r requirements/cpu.txt
$pip install -q --no-deps --ignore-requires-python megatron-core==0.19.2
$pip install -q --no-deps "$out"/dist/*.whl
# The job's scripts without the packages beside them: Python finds those of the wheel.
cp -r examples "$out/job/examples"
cd "$out/job"
"$out/venv/bin/sglang-trace" --version
"$out/venv/bin/sglang-trace" patches apply
"$out/venv/bin/python" - "$root" <<'PY'
import sys
import bridge, megatron_trace, patches, sglang_trace

for package in (bridge, megatron_trace, patches, sglang_trace):
    assert not package.__file__.startswith(sys.argv[1] + "/" + package.__name__), package.__file__
PY
OMP_NUM_THREADS=1 "$out/venv/bin/python" -m examples.demo --out "$out/demo"
