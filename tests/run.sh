#!/usr/bin/env bash
# Installs like the quickstart, then runs every test that needs no GPU and is not marked long, two files at a time: most tests wait for processes.
#   bash tests/run.sh                          all of them
#   bash tests/run.sh tests/algo -k clipped    arguments go to pytest
#   bash tests/run.sh --quick                  lint, and the tests that start no engine, no run and no sandbox: minutes
#   bash tests/run.sh -m long -n 0             what is run by hand (benchmarks/ has the dated logs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/install.sh
if command -v g++ >/dev/null; then
    bash launch/install_alfworld.sh
else
    echo "tests/run.sh: there is no g++: tests of task=alfworld are skipped"
fi
if command -v apt-get >/dev/null && [[ $EUID -eq 0 ]]; then
    bash launch/install_slurm.sh || echo "tests/run.sh: Slurm could not be installed: its tests are skipped"
    if ! command -v chromium >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null || echo "tests/run.sh: no chromium: the page's tests in it are skipped"
    fi
else
    echo "tests/run.sh: there is no apt-get, or this is not root: tests of Slurm and of the page in a browser are skipped"
fi
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # many short processes import the same 2 GB of packages: compile once
export OMP_NUM_THREADS=1 # processes of the distributed tests share the cores; torchrun sets the same
if [[ ${1-} == --quick ]]; then
    shift
    bash tests/lint.sh
    set -- tests/{algo,batching,clients,config,contracts,data,evaluation,export,io,memory_plan,models,observe,policy,rewards,rollout,run,tasks} \
        tests/distributed/test_{image_exchange,world}.py tests/entrypoints/test_rescore.py tests/launcher/test_sweep_file.py \
        tests/preflight/test_{gpus,nodes,prompts,settings}.py tests/test_*.py --deselect tests/contracts/test_recipes.py \
        --deselect tests/evaluation/test_endpoint_policy.py --deselect tests/tasks/lewis/server --deselect tests/tasks/test_alfworld_players.py "$@"
fi
exec python -m pytest -m "not gpu and not long" --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15 "$@"
