#!/bin/sh
# Checks device=cuda where there is a card, in under ten minutes: the tests that need one, then a table of what it does.
# Exit codes: 0 all well, 1 something failed, 3 no card here (one line says why). PYTHON names the interpreter.
#   scripts/gpu_check.sh            # MOEBENCH_HOME keeps packs between runs, else all is made in a folder that goes
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
reason=$("$PYTHON" -c 'from moebench.backends.cuda_state import refusal; print(refusal() or "")')
if [ -n "$reason" ]; then
    echo "gpu_check: nothing was checked: $reason"
    exit 3
fi
if [ -z "${MOEBENCH_HOME:-}" ]; then
    MOEBENCH_HOME=$(mktemp -d)
    export MOEBENCH_HOME
    trap 'rm -rf "$MOEBENCH_HOME"' EXIT
fi
timeout 240 "$PYTHON" -m pytest -q tests/test_cuda_device.py
timeout 330 "$PYTHON" benchmarks/cuda_table.py
