#!/usr/bin/env bash
# Installs environments of task=gymnasium into .venv: pygame for FrozenLake and other environments of gymnasium, MiniGrid,
# Atari, Crafter, MiniWorld and the pages of MiniWoB. MiniWorld needs EGL and Mesa, and MiniWoB needs Chromium.
#   bash launch/install_environments.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/environments.txt
STAMP=.venv/environments.stamp # identifies the installation; removed together with .venv

bash launch/install.sh
if [[ ! -f $STAMP ]] || ! cmp -s "$LOCK" "$STAMP"; then
    echo "install_environments: installing $(grep -c '==' "$LOCK") packages from $LOCK"
    .venv/bin/python -m pip install -qq --no-input --no-deps --require-hashes -r "$LOCK"
    # The wheel of opensimplex has a package `tests`, which would hide the tests of this repository.
    PACKAGES=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [[ -f $PACKAGES/tests/test_opensimplex.py ]]; then
        rm -r "$PACKAGES/tests"
    fi
    .venv/bin/python -c 'import ale_py, crafter, minigrid, pygame' >/dev/null || {
        echo "install_environments: error: the packages of $LOCK cannot be imported" >&2
        exit 1
    }
    cp "$LOCK" "$STAMP.partial"
    mv "$STAMP.partial" "$STAMP"
fi
PYGLET_HEADLESS=1 .venv/bin/python -c 'import miniworld' >/dev/null 2>&1 ||
    echo "install_environments: MiniWorld cannot be imported: it needs EGL and Mesa (Debian: apt-get install libegl1 libgl1-mesa-dri)"
command -v chromium chromium-browser google-chrome >/dev/null ||
    echo "install_environments: MiniWoB needs Chromium (Debian: apt-get install chromium)"
