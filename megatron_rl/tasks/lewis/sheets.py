"""A contact sheet of an evaluation: of each game what was described, the words, and the candidates with the listener's p(yes) of each.

A green frame is the target's, a red one that of a pick that was wrong. FOLDER/evaluation_0003.png is the fourth; each engine's leader draws
the games that it played.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.rewards.rubric import Outcome
from megatron_rl.tasks.lewis.description import described
from megatron_rl.tasks.lewis.listener_protocol import Heard
from megatron_rl.tasks.lewis.rewards import is_held_out
from megatron_rl.types import Example, Rollout

MOST_GAMES, MOST_SHOWN = 12, 6
"""Games of a sheet; candidates of a game."""
SIDE, EDGE, LINE, WIDE = 112, 8, 15, 44
"""Pixels of a picture, between pictures, of a line of words; letters of a line beside the pictures."""
GREEN, RED, PLAIN = "#2e8b3d", "#c02a2a", "#bbbbbb"


class Sheets:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heard: dict[tuple[str, int, str], Heard | None] = {}
        self._is_greedy = True

    def note(self, outcome: Outcome, heard: Heard | None) -> None:
        """Keep what was heard of a held-out game until the sheet is drawn."""
        rollout = outcome.rollout
        if is_held_out(rollout.example_id):
            self._heard[rollout.example_id, rollout.sample_index, outcome.replies[-1]] = heard

    def draw(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> None:
        """The sheet of the greedy episodes, of which an evaluation asks first (evaluation/in_run.py), and no other of those at temperature
        1."""
        if self._is_greedy:
            known = [(each, (each.example_id, each.sample_index, each.turns[-1].text)) for each in rollouts if each.turns]
            games = [(examples[each.group], key[2], self._heard[key]) for each, key in known if key in self._heard]
            if games:
                self._keep(sheet_of(games[:MOST_GAMES]))
        self._is_greedy = not self._is_greedy
        self._heard.clear()

    def _keep(self, sheet: Picture) -> None:
        """Under the next free number, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f".{os.getpid()}.partial.png"
        sheet.save(partial)
        number = len(list(self._folder.glob("evaluation_*.png")))
        while True:
            try:
                os.link(partial, self._folder / f"evaluation_{number:04d}.png")
                break
            except FileExistsError:
                number += 1
        partial.unlink()


def sheet_of(games: Sequence[tuple[Example, str, Heard | None]]) -> Picture:
    """A row a game."""
    shown = min(max(len(example.payload["candidates"]) for example, _, _ in games), MOST_SHOWN)
    height, words = SIDE + LINE + 2 * EDGE, 7 * WIDE
    sheet = Image.new("RGB", ((shown + 1) * (SIDE + EDGE) + words + 2 * EDGE, height * len(games)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for row, (example, reply, heard) in enumerate(games):
        payload, top = example.payload, row * height + EDGE
        sheet.paste(_small(payload["images"][0].open()), (EDGE, top))
        said = described(reply, category=str(payload["category"]))
        lines = textwrap.wrap(f"{payload['category']}: {said.coarse} | {said.detailed or '(nothing)'}", WIDE)
        text = _latin("\n".join(lines[: SIDE // LINE]))
        pen.multiline_text((2 * EDGE + SIDE, top), text, fill="black", font=font)
        for column, place in enumerate(_places(payload, heard, shown)):
            left = 2 * EDGE + SIDE + words + column * (SIDE + EDGE)
            sheet.paste(_small(payload["candidates"][place].open()), (left, top))
            color = GREEN if place == payload["target"] else RED if heard and place == heard.predicted_index else PLAIN
            pen.rectangle((left - 2, top - 2, left + SIDE + 1, top + SIDE + 1), outline=color, width=3)
            mark = " <-" if heard and place == heard.predicted_index else ""
            pen.text((left, top + SIDE + 2), f"{heard.yes_probabilities[place]:.3f}{mark}" if heard else "-", fill=color, font=font)
    return sheet


def _places(payload: Mapping[str, Any], heard: Heard | None, shown: int) -> list[int]:
    """Of the candidates that have room, in their order: the target and what was picked are among them."""
    first = [payload["target"], *([heard.predicted_index] if heard else [])]
    return sorted(list(dict.fromkeys([*first, *range(len(payload["candidates"]))]))[:shown])


def _small(picture: Picture) -> Picture:
    picture = picture.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(picture, ((SIDE - picture.width) // 2, (SIDE - picture.height) // 2))
    return square


def _latin(text: str) -> str:
    """What the font that comes with Pillow has."""
    return text.encode("latin-1", "replace").decode("latin-1")
