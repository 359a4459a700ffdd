"""A process that has TextWorld loaded and forks a player for each channel that it is sent; run as a script, it imports nothing of torch.

    python -m megatron_rl.tasks.alfworld.player_server CONTROL SECONDS [GAME]

CONTROL is an open socket: when all is loaded a byte leaves by it, and every byte that arrives on it brings the channel of a new player.
SECONDS is what a player may take for an answer; then the kernel ends it, whatever it is in. GAME is read first, so that players need not
parse what all games share.
No orphans: the keeper ends when the control is closed, or its parent is another, and its players end with it.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from megatron_rl.tasks.alfworld.textworld_engine import Game

PR_SET_PDEATHSIG = 1
READY = b"r"
LOOK_S = 1.0
"""Between two looks at the parent."""


class Answers:
    """The players' end of a channel: lines of JSON. An error is the last of them, and the process ends there: who knows what it left."""

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rb")
        self.channel = channel

    def send(self, answer: Mapping[str, object]) -> None:
        self.channel.sendall(json.dumps(answer).encode() + b"\n")

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None and not issubclass(kind, ConnectionError):
                self.send({"fault": f"{kind.__name__}: {error}"})
        finally:
            os._exit(0 if kind is None else 1)


def play(channel: socket.socket, seconds: float) -> None:
    """Answer until nobody asks. Never returns."""
    with Answers(channel) as answers:
        game: Game | None = None
        for line in answers.lines:
            asked = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM, which nobody handles
            if "game" in asked:
                game = Game(Path(asked["game"]))
                answer = {"task": game.task, **asdict(game.start())}
            else:
                assert game is not None, "asked before a game"
                answer = {"plan": game.plan()} if asked.get("plan") else asdict(game.step(asked["command"]))
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.send(answer)


def keep(control: socket.socket, seconds: float) -> None:
    parent, keeper = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # players are reaped by the kernel
    while os.getppid() == parent:
        if not select.select([control], [], [], LOOK_S)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == keeper:
                play(socket.socket(fileno=descriptors[0]), seconds)
            os._exit(1)
        os.close(descriptors[0])


def main(words: list[str]) -> None:
    control, seconds = socket.socket(fileno=int(words[0])), float(words[1])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for game in words[2:]:
        Game(Path(game)).start()
    signal.setitimer(signal.ITIMER_REAL, 0)
    control.sendall(READY)
    keep(control, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
