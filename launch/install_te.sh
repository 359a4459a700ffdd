#!/usr/bin/env bash
# Builds Transformer Engine into .venv; GPUs of compute capability 9.0 and newer then use its layers
# (docs/kernels.md). Not tested yet.
#   bash launch/install_te.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/te.txt
STAMP=.venv/te.stamp # identifies the build; removed together with .venv
PINS=.venv/te.constraints # gpu.txt without hashes: if one file has hashes, pip requires them for every package

fail() { echo "install_te: error: $*" >&2; exit 1; }

bash launch/install.sh gpu
if [[ -f $STAMP ]] && cmp -s "$LOCK" "$STAMP"; then
    exit 0
fi
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
command -v "$nvcc" >/dev/null || fail "needs nvcc of CUDA 13 to build; install the CUDA toolkit, set CUDA_HOME to its folder, and run this again."
"$nvcc" --version | grep -q 'release 13\.' ||
    fail "$nvcc is not from CUDA 13, for which torch is built; install that toolkit, set CUDA_HOME to its folder, and run this again."
command -v g++ >/dev/null || fail "needs g++ to build. Install it (Debian: apt-get install g++) and run this again."
echo "install_te: building $(grep -c '==' "$LOCK") packages from $LOCK (many minutes)"
# Build against the torch in .venv, and keep the package versions of gpu.txt.
grep -hoE '^[A-Za-z0-9_.-]+==[^ ]+' requirements/torch.txt requirements/gpu.txt >"$PINS"
# The headers of cuDNN and NCCL are in packages of gpu.txt; CUDA's toolkit does not contain them.
CPATH=$(.venv/bin/python -c 'import nvidia.cudnn as c, nvidia.nccl as n; print(f"{c.__path__[0]}/include:{n.__path__[0]}/include")') ||
    fail "the packages of requirements/gpu.txt have no headers of cuDNN and NCCL"
export CPATH
NVTE_FRAMEWORK=pytorch .venv/bin/python -m pip install -qq --no-input --no-build-isolation -c "$PINS" -r "$LOCK"
.venv/bin/python -c 'from megatron.core.extensions.transformer_engine import HAVE_TE; raise SystemExit(not HAVE_TE)' ||
    fail "the packages of $LOCK cannot be imported with megatron-core"
cp "$LOCK" "$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
