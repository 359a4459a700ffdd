#!/usr/bin/env bash
# Installs the packages of task=alfworld into .venv. The planner of TextWorld is compiled once, which
# requires g++ and takes some minutes.
#   bash launch/install_alfworld.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/alfworld.txt
STAMP=.venv/alfworld.stamp # identifies the installation; removed together with .venv

bash launch/install.sh
if [[ -f $STAMP ]] && cmp -s "$LOCK" "$STAMP"; then
    exit 0
fi
if ! command -v g++ >/dev/null; then
    echo "install_alfworld: error: needs g++ to compile TextWorld's planner. Install it (Debian: apt-get install g++) and run this again." >&2
    exit 1
fi
echo "install_alfworld: installing $(grep -c '==' "$LOCK") packages from $LOCK (its planner is compiled: minutes)"
.venv/bin/python -m pip install -qq --no-input --no-deps --require-hashes -r "$LOCK"
.venv/bin/python -c 'import megatron_rl.tasks.alfworld.textworld_engine' || {
    echo "install_alfworld: error: the packages of $LOCK cannot be imported" >&2
    exit 1
}
cp "$LOCK" "$STAMP.partial"
mv "$STAMP.partial" "$STAMP"
