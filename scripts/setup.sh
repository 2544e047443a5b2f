#!/usr/bin/env bash
# Makes .venv at the root of the checkout: pinned packages, this project, both upstreams patched.
# Safe to run again: it does only what is missing. PYTHON picks the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv

"$python" - <<'PY' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"error: Python {sys.version.split()[0]} is not supported; run with PYTHON=python3.11 or PYTHON=python3.12")
PY

wanted=$(cat requirements/cpu.txt scripts/setup.sh setup.py bridge/daemon/fetch/csrc/*.c | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.installed 2>/dev/null)" != "$wanted" ]; then
  [ -x $venv/bin/python ] || "$python" -m venv $venv || {
    echo "error: 'python3 -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
  pip="$venv/bin/python -m pip --disable-pip-version-check --no-input"
  echo "set-up 1/4: torch" >&2
  $pip install -q torch==2.13.0
  echo "set-up 2/4: pinned packages, SGLang 0.5.23 among them" >&2
  $pip install -q --no-deps -r requirements/cpu.txt
  echo "set-up 3/4: Megatron-core 0.19.2" >&2
  # Its wheel for Python 3.11 asks for 3.12; all of megatron.core works on 3.11 too.
  $pip install -q --no-deps --ignore-requires-python megatron-core==0.19.2
  echo "set-up 4/4: sglang-trace" >&2
  $pip install -q --no-deps -e .
  echo "$wanted" > $venv/.installed
fi
$venv/bin/python -m patches apply
