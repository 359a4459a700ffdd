#!/usr/bin/env bash
# Creates a virtual environment for each agent framework of examples/agents. Their pins conflict with those of .venv.
#   bash launch/install_agents.sh FOLDER                          # FOLDER/openai_agents, FOLDER/smolagents, FOLDER/verifiers
#   bash launch/install_agents.sh FOLDER openai_agents            # one of them
set -euo pipefail

LOCKS=$(cd "$(dirname "${BASH_SOURCE[0]}")/../requirements/agents" && pwd)
if [[ $# -lt 1 ]]; then
    echo "install_agents: error: name a folder: bash launch/install_agents.sh .venv-agents" >&2
    exit 2
fi
FOLDER=$1
shift
[[ $# -gt 0 ]] || set -- openai_agents smolagents verifiers

for NAME in "$@"; do
    LOCK=$LOCKS/$NAME.txt
    if [[ ! -f $LOCK ]]; then
        echo "install_agents: error: $NAME: there is no such environment; use openai_agents, smolagents or verifiers" >&2
        exit 2
    fi
    TARGET=$FOLDER/$NAME
    if [[ -f $TARGET/installed.txt ]] && cmp -s "$LOCK" "$TARGET/installed.txt"; then
        continue
    fi
    SECONDS=0
    python3 -m venv --clear "$TARGET"
    "$TARGET/bin/python" -m pip install -qq --no-input --no-deps --require-hashes --only-binary=:all: -r "$LOCK"
    "$TARGET/bin/python" -m pip check >/dev/null || {
        echo "install_agents: error: the packages of $LOCK do not fit together" >&2
        exit 1
    }
    cp "$LOCK" "$TARGET/installed.txt"
    echo "install_agents: $TARGET: $(grep -c '==' "$LOCK") packages, $(du -sm "$TARGET" | cut -f1) MB, $SECONDS s"
done
