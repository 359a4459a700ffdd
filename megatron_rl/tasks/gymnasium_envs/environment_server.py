"""Server that loads an environment once and forks a process for each episode.

    python -m megatron_rl.tasks.gymnasium_envs.environment_server CONTROL SECONDS SPEC [STAGE]
    python -m megatron_rl.tasks.gymnasium_envs.environment_server check SECONDS SPEC

SECONDS is the time limit of a request, and SPEC an EpisodeSpec as JSON. CONTROL is the file
descriptor of the control socket (process_server.py). With `check`, no processes are forked: an
environment is created and reset, and one line of JSON with its grammar is written to stdout.

Before it forks, the server creates, resets, renders and closes environments (`warm_up`), so that
processes inherit what environments compute once, such as the tiles of MiniGrid's frames. If that
leaves threads or open files behind, which must not be forked, the server starts again and only
imports the environment (STAGE is `imports`). If the import does so too, as that of MiniWorld, which
starts OpenGL, the server starts again and forks processes that import the environment themselves
(`nothing`).

Every answer to a request of the pool contains the result, or `refused`: key, value and remedy.
"""

import json
import os
import socket
import sys
import time
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from megatron_rl.tasks.gymnasium_envs.episode import Episode, EpisodeSpec, Refused, import_environment
from megatron_rl.tasks.process_server import RequestChannel, fork_processes, kill_after

WARM_UP_SEEDS, WARM_UP_S = 16, 2.0
STAGES = ("warm_up", "imports", "nothing")
"""Stages of the server, from most to least work before it forks (docstring of the module)."""


def serve_episode(channel: socket.socket, *, spec: EpisodeSpec, timeout_s: float) -> None:
    """Answer requests until the channel is closed, close the environment and end the process.

    This function never returns.
    """
    with RequestChannel(channel) as answers:
        episode: Episode | None = None
        try:
            for line in answers.lines:
                asked = json.loads(line)
                if "close" in asked:
                    break
                with kill_after(timeout_s):
                    try:
                        if episode is None:
                            episode = Episode(spec)
                        answer = (
                            episode.reset(asked["seed"], grammar=asked["grammar"]) if "seed" in asked else episode.step(asked["action"])
                        )
                    except Refused as refused:
                        answer = {"refused": [str(part) for part in refused.args]}
                answers.send(answer)
        finally:
            with kill_after(timeout_s):
                if episode is not None:
                    episode.env.close()
        answers.send({})


def check_environment(spec: EpisodeSpec, *, seed: int = 0) -> dict[str, Any]:
    """Create and reset an environment; return its grammar, or `refused`: key, value and remedy."""
    try:
        episode = Episode(spec)
        try:
            grammar = episode.describe()
            episode.reset(seed, grammar=grammar)
        finally:
            episode.env.close()
    except Refused as refused:
        return {"refused": [str(part) for part in refused.args]}
    return {"grammar": grammar}


def warm_up(spec: EpisodeSpec, *, timeout_s: float) -> None:
    """Run the first observation of several seeds, for at most about WARM_UP_S seconds."""
    started = time.monotonic()
    for seed in range(WARM_UP_SEEDS):
        with kill_after(timeout_s):
            check_environment(spec, seed=seed)
        if time.monotonic() - started > WARM_UP_S:
            return


def count_resources() -> tuple[int, int]:
    """Return the numbers of threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def main(arguments: list[str]) -> None:
    """Check an environment, or fork processes that run it."""
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    seconds, spec = float(arguments[1]), EpisodeSpec(**json.loads(arguments[2]))
    if arguments[0] == "check":
        stdout = os.dup(1)
        os.dup2(2, 1)  # environments and their libraries may print
        with kill_after(seconds):
            answer = check_environment(spec)
        os.write(stdout, json.dumps(answer).encode() + b"\n")
        return
    stage, before = arguments[3] if len(arguments) > 3 else STAGES[0], count_resources()
    if stage != "nothing":
        entry_point = gymnasium.registry[import_environment(spec.id)].entry_point
        if isinstance(entry_point, str):
            load_env_creator(entry_point)
    if stage == "warm_up":
        warm_up(spec, timeout_s=seconds)
    if count_resources() != before:
        later = STAGES[STAGES.index(stage) + 1]
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *arguments[:3], later])
    control = socket.socket(fileno=int(arguments[0]))
    fork_processes(control, partial(serve_episode, spec=spec, timeout_s=seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
