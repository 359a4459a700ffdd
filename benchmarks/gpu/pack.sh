#!/usr/bin/env bash
# Packs what a GPU machine without a network needs into .gpu/site.tar.xz (46 MB; 5 minutes, 0.8 GB of disk).
#   bash benchmarks/gpu/pack.sh              needs python3.12 with pip, and a package index
#   bash benchmarks/gpu/pack.sh python3      another name for Python 3.12
# The archive holds vLLM's CUDA wheel, cut by slices.py, and the packages of need.txt for Python 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${1:-python3.12}
KIT=.gpu
PIP=("$PYTHON" -m pip -q --disable-pip-version-check)

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "pack: error: $PYTHON is not Python 3.12" >&2; exit 1; }
mkdir -p "$KIT/src" "$KIT/whl"
rm -rf "$KIT/site" "$KIT/site.tar.xz"
"${PIP[@]}" download --no-deps --only-binary=:all: -d "$KIT/src" vllm==0.32.0
"$PYTHON" benchmarks/gpu/slices.py "$KIT"/src/vllm-0.32.0-*.whl "$KIT/site"
"${PIP[@]}" wheel --no-deps -w "$KIT/whl" -r benchmarks/gpu/need.txt
"${PIP[@]}" install --no-index --no-deps --no-compile --target "$KIT/site" "$KIT"/whl/*.whl
XZ_OPT=-9 tar -cJf "$KIT/site.tar.xz.partial" -C "$KIT" site
mv "$KIT/site.tar.xz.partial" "$KIT/site.tar.xz"
echo "pack: $(du -h "$KIT/site.tar.xz" | cut -f1) in $KIT/site.tar.xz"
