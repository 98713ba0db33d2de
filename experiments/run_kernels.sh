#!/usr/bin/env bash
# Checks and times the Pallas kernels on the accelerator that is here.
#
#   experiments/run_kernels.sh [FOLDER]     results go to FOLDER, by default ./results
#
# PYTHON names the interpreter; else .venv's is taken where it sees an accelerator, else python3.
# JAX and NumPy are all it needs, and matplotlib for the picture.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-${OUT:-results}}"

usable() { "$1" -c 'import jax' 2>/dev/null; }
accelerated() { "$1" -c 'import jax, sys; sys.exit(jax.default_backend() == "cpu")' 2>/dev/null; }

if [[ -z "${PYTHON:-}" ]]; then
  for candidate in "$root/.venv/bin/python" python3 python; do
    command -v "$candidate" >/dev/null || continue
    if accelerated "$candidate"; then PYTHON="$candidate"; break; fi
    if [[ -z "${PYTHON:-}" ]] && usable "$candidate"; then PYTHON="$candidate"; fi
  done
fi
if [[ -z "${PYTHON:-}" ]]; then
  echo "error: no Python here can import jax; name one, as in: PYTHON=python3.12 $0" >&2
  exit 2
fi

# Of a long report the end is what remains visible, so the table comes last, and this first.
"$PYTHON" -c 'import platform, sys, jax; print("Python", platform.python_version(), "of", sys.executable); print("JAX", jax.__version__, "on", ", ".join(d.device_kind for d in jax.devices()))'
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m experiments.kernel_run --output="$folder"
