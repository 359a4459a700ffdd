"""Server that loads TextWorld once and forks players (process_server.py).

    python -m megatron_rl.tasks.alfworld.player_server CONTROL SECONDS [GAME]

CONTROL is the file descriptor of the control socket. SECONDS is the time limit for each request to
a player. GAME is loaded before players are forked, so players inherit the parsed data that all
games share. When this module runs as a script, it does not import torch.
"""

import json
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_rl.tasks.alfworld.textworld_engine import TextWorldGame
from megatron_rl.tasks.process_server import RequestChannel, fork_processes, kill_after


def serve_player(channel: socket.socket, *, timeout_s: float) -> None:
    """Answer requests until the channel is closed, then end the process.

    This function never returns.
    """
    with RequestChannel(channel) as answers:
        game: TextWorldGame | None = None
        for line in answers.lines:
            asked = json.loads(line)
            with kill_after(timeout_s):
                if "game" in asked:
                    game = TextWorldGame(Path(asked["game"]))
                    answer = {"task": game.task, **asdict(game.start())}
                else:
                    assert game is not None, "asked before a game"
                    answer = {"plan": game.plan_commands()} if asked.get("plan") else asdict(game.step(asked["command"]))
            answers.send(answer)


def main(arguments: list[str]) -> None:
    """Load TextWorld and the games in `arguments`, then fork players."""
    control, seconds = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    with kill_after(seconds):
        for game in arguments[2:]:
            TextWorldGame(Path(game)).start()
    fork_processes(control, partial(serve_player, timeout_s=seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
