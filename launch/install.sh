#!/usr/bin/env bash
# Creates .venv with the pinned packages and this package. If nothing has changed, the script does nothing; an
# interrupted installation is repaired.
#   bash launch/install.sh          for this machine, with or without a GPU
#   bash launch/install.sh gpu      for other machines: a login node without a GPU, a container image
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/megatron_rl.stamp       # identifies the installation: directory, lock files, setup.py
BUILDING=$VENV/megatron_rl.building # exists while packages are being installed

say() { echo "install: $*"; }
fail() { echo "install: error: $*" >&2; exit 1; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs CPython 3.11 (or 3.12 or 3.13, which are not tested) with its venv module; no python3 in PATH is suitable." \
        "Install it (Debian: apt-get install python3.11 python3.11-venv) and run this again."
}

# When a run starts, Triton compiles its launchers with the machine's compiler and Python's headers.
check_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
        fail "needs a C compiler for Triton; install one (Debian: apt-get install gcc) and run this again."
    "$1" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "needs Python's headers for Triton; install them (Debian: apt-get install python3.11-dev) and run this again."
}

# With an old driver, nvidia-smi works but torch finds no GPU, so a run would silently use the CPU.
check_driver() {
    "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch finds no GPU: NVIDIA's driver is $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)," \
            "but CUDA 13 needs 580 or newer. Install a newer driver and run this again."
}

wanted_stamp() {
    echo "$PWD"
    cat "$TORCH" "$LOCK" setup.py
}

# Detect a wheel for another platform without importing torch, because the import would fail.
check_torch() {
    local cuda
    cuda=$("$VENV/bin/python" - <<'PYTHON'
import importlib.util
import pathlib
import runpy

folder = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
print(runpy.run_path(str(folder / "version.py"))["cuda"])
PYTHON
    )
    if [[ $LOCK == *cpu.txt && $cuda != None ]]; then
        fail "pip installed torch built for CUDA $cuda, but this installation is for machines without a CUDA device." \
            "Point pip at PyTorch's CPU wheel index (PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS for a folder of wheels) and run this again."
    elif [[ $LOCK == *gpu.txt && $cuda == None ]]; then
        fail "pip installed the CPU build of torch, but this installation is for machines with a CUDA device." \
            "Remove PyTorch's CPU wheel index from pip's settings and run this again."
    fi
}

# Check that a run's imports work, and write their bytecode once, regardless of
# PYTHONDONTWRITEBYTECODE, so that the processes of a run do not each compile them.
check_imports() {
    local output
    output=$(env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$VENV/bin/python" - 2>&1 <<'PYTHON'
import importlib

for name in (
    "hydra", "matplotlib.figure", "megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.optimizer",
    "megatron.core.pipeline_parallel", "pytest", "torch.distributed.run", "torch.utils.tensorboard", "torchvision.transforms.v2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2_5_vl", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker",
):
    importlib.import_module(name)
PYTHON
    ) || fail "the packages of $LOCK cannot be imported together:" "$output"
}

TORCH=requirements/torch.txt # without hashes, because each index has its own builds; see check_torch
LOCK=requirements/${1:-cpu}.txt
if [[ $# == 0 ]] && has_gpu; then LOCK=requirements/gpu.txt; fi
if [[ $LOCK != requirements/[cg]pu.txt ]]; then fail "$1: unknown kind of machine; use cpu or gpu, or omit it to detect a GPU"; fi

if [[ -f $STAMP && ! -e $BUILDING ]] && wanted_stamp | cmp -s - "$STAMP" && "$VENV/bin/python" -c 'import pip'; then
    exit 0
fi

if [[ -e $VENV ]]; then
    if [[ -e $BUILDING ]]; then
        say "an earlier installation did not finish; starting over"
        rm -rf "$VENV"
    elif ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        say "$VENV has no working Python; starting over"
        rm -rf "$VENV"
    elif [[ -f $STAMP && $(head -n 1 "$STAMP") != "$PWD" ]]; then
        say "this folder was moved; starting over"
        rm -rf "$VENV"
    fi
fi

started=$SECONDS
if [[ ! -e $VENV ]]; then
    python=$(find_python)
    if [[ $LOCK == *gpu.txt ]]; then check_compiler "$python"; fi
    say "creating $VENV with $("$python" --version)"
    if [[ $("$python" --version) != *" 3.11."* ]]; then say "only Python 3.11 is tested"; fi
    "$python" -m venv "$VENV"
fi

touch "$BUILDING"
say "installing $(cat "$TORCH" "$LOCK" | grep -c '==') packages from $TORCH and $LOCK (minutes, depending on the network)"
quiet=(-qq)
if [[ -t 1 ]]; then quiet=(); fi
# --no-compile: most of the 18,000 modules are never imported; `check_imports` compiles the others.
"$VENV/bin/python" -m pip install "${quiet[@]}" --no-input --no-compile --no-deps -r "$TORCH"
check_torch
"$VENV/bin/python" -m pip install "${quiet[@]}" --no-input --no-compile --no-deps --require-hashes -r "$LOCK"
if [[ $LOCK == *gpu.txt ]] && has_gpu; then check_driver; fi
"$VENV/bin/python" -m pip install -qq --no-input --no-deps --no-build-isolation -e .
say "checking that the packages can be imported"
check_imports
wanted_stamp >"$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
rm "$BUILDING"
say "done in $((SECONDS - started)) s; to use it in this shell: source $VENV/bin/activate"
