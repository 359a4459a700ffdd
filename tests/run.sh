#!/usr/bin/env bash
# Installs like the quickstart, then runs every test that needs no GPU. Arguments go to pytest: bash tests/run.sh tests/unit -k losses
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/install.sh
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # many short processes import the same 2 GB of packages: compile once
export OMP_NUM_THREADS=1 # processes of the distributed tests share the cores; torchrun sets the same
exec python -m pytest -m "not gpu" --durations=15 "$@"
