"""The warm start of speakers and listeners of a million parameters, made of the rounds themselves: a speaker names colors (colors.py).

told    the speaker's description of a round's picture, by its colors
vague   the same, but in VAGUE of the rounds a description that fits every picture: what a policy then has to unlearn
heard   the question that a listener's service asks, of the round's target (yes) or of another candidate (no) in turn
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config import require_choice
from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError
from megatron_rl.tasks.lewis.colors import COLORS, naming, told, vague
from megatron_rl.tasks.lewis.description import PROMPT, described
from megatron_rl.tasks.visual_python.message_parts import say
from megatron_rl.types import Demonstration, Example, Message

VAGUE = 0.7
SPLITS = ("told", "vague", "heard")


@dataclass(slots=True, frozen=True)
class Shown(Sequence[Demonstration]):
    """Pictures are opened when they are asked for."""

    plans: Sequence[Callable[[], list[Message]]]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        """ValueError: a picture cannot be opened."""
        try:
            return Demonstration(self.plans[index]())
        except InfraError as fault:
            raise ValueError(str(fault)) from fault


def demonstrated(rounds: Sequence[Example], split: str, *, num: int, seed: int) -> Shown:
    """Of speakers' rounds, gone through in shuffled turns. Fewer are a prefix of more."""
    require_choice("sft.splits", split, SPLITS)
    dice = random.Random(seed)
    order: list[Example] = []
    plans = []
    for _ in range(num):
        order = order or dice.sample(list(rounds), len(rounds))
        example, is_vague, is_target, other = order.pop(), dice.random() < VAGUE, dice.random() < 0.5, dice.random()
        if split == "heard":
            plans.append(_heard(example, is_target=is_target, other=other))
        else:
            plans.append(_said(example, is_vague=is_vague and split == "vague"))
    return Shown(plans)


def _said(example: Example, *, is_vague: bool) -> Callable[[], list[Message]]:
    payload = example.payload
    image, category = payload["images"][0], payload["category"]

    def messages() -> list[Message]:
        picture = image.open()
        reply = vague(category=category) if is_vague else told(picture, category=category)
        return [say("user", picture, payload["question"]), say("assistant", reply)]

    return messages


def _heard(example: Example, *, is_target: bool, other: float) -> Callable[[], list[Message]]:
    candidates, target = example.payload["candidates"], example.payload["target"]
    others = [place for place in range(len(candidates)) if place != target]
    place = target if is_target else others[int(other * len(others))]

    def messages() -> list[Message]:
        question = told_question(example.payload["images"][0], category=example.payload["category"])
        return [say("user", candidates[place].open(), question), say("assistant", "yes" if is_target else "no")]

    return messages


def told_question(image: StoredImage, *, category: str) -> str:
    """Return the question of a listener where the rule of `told` is the speaker. InfraError: the picture cannot be opened."""
    return described(told(image.open(), category=category), category=category).question


def words_of(categories: Sequence[str]) -> list[str]:
    """All prompts and replies in all colors, and questions about them: what a tokenizer of few words shall have whole."""
    dice, texts = random.Random(0), ["yes", "no"] * 20
    for category in categories:
        texts += [PROMPT.format(category=category), vague(category=category)]
        for color in COLORS:
            reply = naming([color, *dice.sample([name for name in COLORS if name != color], 2)], category=category)
            texts += [reply, described(reply, category=category).question]
    return texts
