"""Server that loads TextWorld once and forks a player process for each channel it receives.

    python -m megatron_rl.tasks.alfworld.player_server CONTROL SECONDS [GAME]

CONTROL is the file descriptor of an open socket. When everything is loaded, the server sends one
byte on this socket. To request a new player, the client sends one byte and the file descriptor of
the player's channel (SCM_RIGHTS). SECONDS is the time limit for each request to a player. The
kernel enforces this limit with a signal, even while the player runs C code. GAME is loaded before
players are forked, so players inherit the parsed data that all games share. When this module runs
as a script, it does not import torch.

The server ends when the control socket is closed or the parent process of the server changes. The
kernel kills the players when the server ends.
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
"""Interval in seconds between checks of the parent process."""


class PlayerChannel:
    """Player side of a channel, which carries one JSON object per line.

    If an exception is raised inside the `with` block, the player sends the error and exits, because
    the game's state may be corrupt.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rb")
        self.channel = channel

    def send(self, answer: Mapping[str, object]) -> None:
        """Send one answer as a line of JSON."""
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
    """Answer requests until the channel is closed, then end the process.

    This function never returns.
    """
    with PlayerChannel(channel) as answers:
        game: TextWorldGame | None = None
        for line in answers.lines:
            asked = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)  # sends SIGALRM, which ends the process because it has no handler
            if "game" in asked:
                game = TextWorldGame(Path(asked["game"]))
                answer = {"task": game.task, **asdict(game.start())}
            else:
                assert game is not None, "asked before a game"
                answer = {"plan": game.plan_commands()} if asked.get("plan") else asdict(game.step(asked["command"]))
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.send(answer)


def fork_players(control: socket.socket, timeout_s: float) -> None:
    """Fork a player for each channel that arrives on the control socket.

    The function returns when the control socket is closed or the parent process changes.
    """
    parent, keeper = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps players
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
    """Load TextWorld and the games in `arguments`, then fork players."""
    control, seconds = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for game in arguments[2:]:
        TextWorldGame(Path(game)).start()
    signal.setitimer(signal.ITIMER_REAL, 0)
    control.sendall(READY_BYTE)
    fork_players(control, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
