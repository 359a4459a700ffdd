"""Draws contact sheets for evaluations.

Each row shows one game: the image, the description, and the candidates with the listener's p(yes).
A green frame marks the target, and a red frame marks a wrong pick. Sheets are numbered from 0:
FOLDER/evaluation_0003.png is the fourth sheet. Each engine's leader rank draws a sheet of the games
that the engine generated.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.tasks.lewis.description import parse_description
from megatron_rl.tasks.lewis.listener_protocol import ListenerScore
from megatron_rl.tasks.lewis.rewards import is_held_out
from megatron_rl.types import Example, Rollout

MAX_GAMES, MAX_CANDIDATES_SHOWN = 12, 6
"""Maximum number of games on a sheet, and maximum number of candidates that are drawn per game."""
IMAGE_SIDE, MARGIN, LINE_HEIGHT, LINE_CHARS = 112, 8, 15, 44
"""Layout of a sheet: side length of an image, margin, and height of a text line, all in pixels, and
maximum number of characters in a text line.
"""
GREEN, RED, PLAIN = "#2e8b3d", "#c02a2a", "#bbbbbb"


class ContactSheets:
    """Collects listener scores of held-out games and draws one sheet per evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener_scores: dict[tuple[str, int, str], ListenerScore | None] = {}
        self._is_greedy = True

    def record(self, reward_input: RewardInput, listener_score: ListenerScore | None) -> None:
        """Keep the listener's score of a held-out game until the next sheet is drawn."""
        rollout = reward_input.rollout
        if is_held_out(rollout.example_id):
            self._listener_scores[rollout.example_id, rollout.sample_index, reward_input.replies[-1]] = listener_score

    def draw_sheet(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> None:
        """Draw the contact sheet of an evaluation from the greedily decoded episodes.

        An evaluation (evaluation/in_run.py) calls this method twice: first with greedily decoded
        episodes, then with episodes at temperature 1. The second call draws nothing.
        """
        if self._is_greedy:
            known = [(each, (each.example_id, each.sample_index, each.turns[-1].text)) for each in rollouts if each.turns]
            games = [(examples[each.group], key[2], self._listener_scores[key]) for each, key in known if key in self._listener_scores]
            if games:
                self._save_sheet(draw_contact_sheet(games[:MAX_GAMES]))
        self._is_greedy = not self._is_greedy
        self._listener_scores.clear()

    def _save_sheet(self, sheet: Picture) -> None:
        """Save the sheet atomically under the next free number."""
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


def draw_contact_sheet(games: Sequence[tuple[Example, str, ListenerScore | None]]) -> Picture:
    """Return a contact sheet with one row per (example, reply, listener's score) triple."""
    shown = min(max(len(example.payload["candidates"]) for example, _, _ in games), MAX_CANDIDATES_SHOWN)
    height, words = IMAGE_SIDE + LINE_HEIGHT + 2 * MARGIN, 7 * LINE_CHARS
    sheet = Image.new("RGB", ((shown + 1) * (IMAGE_SIDE + MARGIN) + words + 2 * MARGIN, height * len(games)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for row, (example, reply, heard) in enumerate(games):
        payload, top = example.payload, row * height + MARGIN
        sheet.paste(_make_thumbnail(payload["images"][0].open()), (MARGIN, top))
        said = parse_description(reply, category=str(payload["category"]))
        lines = textwrap.wrap(f"{payload['category']}: {said.coarse} | {said.detailed or '(nothing)'}", LINE_CHARS)
        text = _to_latin1("\n".join(lines[: IMAGE_SIDE // LINE_HEIGHT]))
        pen.multiline_text((2 * MARGIN + IMAGE_SIDE, top), text, fill="black", font=font)
        for column, place in enumerate(_choose_candidates(payload, heard, shown)):
            left = 2 * MARGIN + IMAGE_SIDE + words + column * (IMAGE_SIDE + MARGIN)
            sheet.paste(_make_thumbnail(payload["candidates"][place].open()), (left, top))
            color = GREEN if place == payload["target"] else RED if heard and place == heard.predicted_index else PLAIN
            pen.rectangle((left - 2, top - 2, left + IMAGE_SIDE + 1, top + IMAGE_SIDE + 1), outline=color, width=3)
            mark = " <-" if heard and place == heard.predicted_index else ""
            pen.text((left, top + IMAGE_SIDE + 2), f"{heard.yes_probabilities[place]:.3f}{mark}" if heard else "-", fill=color, font=font)
    return sheet


def _choose_candidates(payload: Mapping[str, Any], listener_score: ListenerScore | None, max_shown: int) -> list[int]:
    """Return at most `max_shown` candidate indices in ascending order.

    The target and the listener's pick are always included.
    """
    first = [payload["target"], *([listener_score.predicted_index] if listener_score else [])]
    return sorted(list(dict.fromkeys([*first, *range(len(payload["candidates"]))]))[:max_shown])


def _make_thumbnail(picture: Picture) -> Picture:
    picture = picture.convert("RGB")
    picture.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    square = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
    square.paste(picture, ((IMAGE_SIDE - picture.width) // 2, (IMAGE_SIDE - picture.height) // 2))
    return square


def _to_latin1(text: str) -> str:
    """Replace each character that is missing from Pillow's default font with `?`."""
    return text.encode("latin-1", "replace").decode("latin-1")
