#!/usr/bin/env bash
# Style and types, in a minute: ruff's checks and format, basedpyright, shellcheck, no merge half done. Expects launch/install.sh to have run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PATH="$PWD/.venv/bin:$PATH"
ruff check --quiet .
ruff format --check --quiet .
basedpyright --level error
shellcheck launch/*.sh launch/slurm/*.sh launch/slurm/*.sbatch tests/*.sh .ci/run
if git grep -nE '^(<<<<<<<|>>>>>>>) '; then exit 1; fi
