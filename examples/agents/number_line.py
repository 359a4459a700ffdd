"""NumberLine for agents: rules, pictures and reward, with Python's standard library only.

    PYTHON play_FRAMEWORK.py PICTURES           # one episode: task.options.command
    PYTHON play_FRAMEWORK.py PICTURES PORT      # service for all episodes: task.options.url

A service is faster than one process for each episode, because it imports its framework once. A
question is the start state, for example "current 3, target 5". The policy receives the state as a
picture from the folder PICTURES, which record_transcripts.py writes.
"""

import base64
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROMPT = "NumberLine: which way?"
MAX_NUMBER, MAX_MOVES = 5, 10


@dataclass
class Episode:
    """Question of one episode, and the address and key of the policy."""

    question: str
    pictures: Path
    base_url: str
    api_key: str


class NumberLine:
    """One game. The rules are those of task=number_line: 1 for the target, -1 for each mistake."""

    def __init__(self, episode: Episode) -> None:
        self.current, self.target = (int(number) for number in re.findall(r"\d+", episode.question))
        self.pictures, self.reward, self.num_moves = episode.pictures, 0, 0

    @property
    def is_over(self) -> bool:
        """True at the target, and after the last move."""
        return self.current == self.target or self.num_moves >= MAX_MOVES

    def move(self, action: str) -> str:
        """Add 1 with "+", subtract 1 with "-", and return a sentence about the new state."""
        if self.is_over:
            return f"The game is over. {self}"
        self.num_moves += 1
        distance = abs(self.current - self.target)
        if action in ("+", "-"):
            self.current = min(max(self.current + (1 if action == "+" else -1), 0), MAX_NUMBER)
        if self.current == self.target:
            self.reward += 1
        elif abs(self.current - self.target) >= distance:
            self.reward -= 1
        return str(self)

    def finish(self) -> int:
        """Return the reward of the episode. Each move of an unfinished game counts as a mistake.

        Otherwise, a policy would learn to end early, where an average game has many mistakes.
        """
        return self.reward if self.is_over else self.reward - (MAX_MOVES - self.num_moves)

    def __str__(self) -> str:
        return f"Current: {self.current}. Target: {self.target}."

    def picture(self) -> bytes:
        """Return the picture of the state as a PNG file."""
        return (self.pictures / f"current{self.current}_target{self.target}.png").read_bytes()

    def picture_url(self) -> str:
        """Return the picture of the state as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.picture()).decode()}"


PlayFn = Callable[[Episode], float]
"""Plays one episode and returns its reward."""


def run(play: PlayFn) -> None:
    """Run one episode, or a service if a port is given. task.reward=reported reads the result."""
    pictures = Path(sys.argv[1])
    if len(sys.argv) > 2:
        serve(play, pictures, int(sys.argv[2]))
        return
    given = json.loads(Path("example.json").read_text())
    episode = Episode(given["question"], pictures, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps({"reward": play(episode)}))


def serve(play: PlayFn, pictures: Path, port: int) -> None:
    """Answer each POST request with the result of its episode, until the process is ended."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            episode = Episode(given["question"], pictures, given["base_url"], given["api_key"])
            try:
                status, text = 200, json.dumps({"reward": play(episode)})
            except Exception as error:  # the run receives the error of any framework
                status, text = 500, f"{type(error).__name__}: {error}"[:300]
                print(f"{episode.question}: {text}", file=sys.stderr, flush=True)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:
                pass  # the run has ended the episode

        def log_message(self, *arguments: object) -> None:
            """Print nothing for each request."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # a step starts all its episodes at once

    server = Server(("127.0.0.1", port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
