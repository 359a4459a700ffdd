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

from megatron_rl.tasks.alfworld.textworld_engine import TextWorldGame

PR_SET_PDEATHSIG = 1
READY_BYTE = b"r"
PARENT_POLL_S = 1.0
"""Between two looks at the parent."""


class PlayerChannel:
    """The players' end of a channel: lines of JSON. An error is the last of them, and the process ends there: who knows what it left."""

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rb")
        self.channel = channel

    def send(self, answer: Mapping[str, object]) -> None:
        self.channel.sendall(json.dumps(answer).encode() + b"\n")

    def __enter__(self) -> "PlayerChannel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None and not issubclass(kind, ConnectionError):
                self.send({"fault": f"{kind.__name__}: {error}"})
        finally:
            os._exit(0 if kind is None else 1)


def serve_player(channel: socket.socket, timeout_s: float) -> None:
    """Answer until nobody asks. Never returns."""
    with PlayerChannel(channel) as answers:
        game: TextWorldGame | None = None
        for line in answers.lines:
            asked = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM, which nobody handles
            if "game" in asked:
                game = TextWorldGame(Path(asked["game"]))
                answer = {"task": game.task, **asdict(game.start())}
            else:
                assert game is not None, "asked before a game"
                answer = {"plan": game.plan_commands()} if asked.get("plan") else asdict(game.step(asked["command"]))
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.send(answer)


def fork_players(control: socket.socket, timeout_s: float) -> None:
    parent, keeper = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # players are reaped by the kernel
    while os.getppid() == parent:
        if not select.select([control], [], [], PARENT_POLL_S)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == keeper:
                serve_player(socket.socket(fileno=descriptors[0]), timeout_s)
            os._exit(1)
        os.close(descriptors[0])


def main(arguments: list[str]) -> None:
    control, seconds = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for game in arguments[2:]:
        TextWorldGame(Path(game)).start()
    signal.setitimer(signal.ITIMER_REAL, 0)
    control.sendall(READY_BYTE)
    fork_players(control, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
