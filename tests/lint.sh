#!/usr/bin/env bash
# Style, types and the documentation site, in a minute: ruff, basedpyright, shellcheck, mkdocs, and no
# unresolved merge conflict. Run launch/install.sh first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PATH="$PWD/.venv/bin:$PATH"
ruff check --quiet .
ruff format --check --quiet .
basedpyright --level error
shellcheck launch/*.sh launch/slurm/*.sh launch/slurm/*.sbatch tests/*.sh .ci/run
site=$(mktemp -d)
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet --site-dir "$site"
rm -rf "$site"
if git grep -nE '^(<<<<<<<|>>>>>>>) '; then exit 1; fi
