"""SFT demonstrations for speakers and listeners with a million parameters, made from game rounds.

There are three splits:

- told: speaker demonstrations. The reply names the colors of the object in the image (colors.py).
- vague: speaker demonstrations. With probability VAGUE_PROBABILITY, the reply is a vague
  description, which fits every object of the category. Otherwise, the reply names colors. The
  policy has to unlearn vague descriptions in RL.
- heard: listener demonstrations. The prompt is the question that the listener service asks its
  model. The question contains a description of the target's colors. With probability 1/2, the image
  is the round's target and the answer is yes. Otherwise, the image is another candidate and the
  answer is no.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config import require_choice
from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError
from megatron_rl.tasks.lewis.colors import COLORS, describe_by_color, write_color_description, write_vague_description
from megatron_rl.tasks.lewis.description import PROMPT, parse_description
from megatron_rl.tasks.visual_python.message_parts import make_message
from megatron_rl.types import Demonstration, Example, Message

VAGUE_PROBABILITY = 0.7
DEMONSTRATION_SPLITS = ("told", "vague", "heard")


@dataclass(slots=True, frozen=True)
class LazyDemonstrations(Sequence[Demonstration]):
    """Demonstrations with images that are opened on access."""

    plans: Sequence[Callable[[], list[Message]]]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        """Return a demonstration.

        Raises:
            ValueError: An image cannot be opened.
        """
        try:
            return Demonstration(self.plans[index]())
        except InfraError as fault:
            raise ValueError(str(fault)) from fault


def make_demonstrations(rounds: Sequence[Example], split: str, *, num: int, seed: int) -> LazyDemonstrations:
    """Return demonstrations from repeated shuffled passes over the speaker rounds.

    A larger `num` with the same seed returns the same demonstrations, followed by additional ones.
    """
    require_choice("sft.splits", split, DEMONSTRATION_SPLITS)
    dice = random.Random(seed)
    order: list[Example] = []
    plans = []
    for _ in range(num):
        order = order or dice.sample(list(rounds), len(rounds))
        example, is_vague, is_target, other = order.pop(), dice.random() < VAGUE_PROBABILITY, dice.random() < 0.5, dice.random()
        if split == "heard":
            plans.append(_listener_messages(example, is_target=is_target, other=other))
        else:
            plans.append(_speaker_messages(example, is_vague=is_vague and split == "vague"))
    return LazyDemonstrations(plans)


def _speaker_messages(example: Example, *, is_vague: bool) -> Callable[[], list[Message]]:
    payload = example.payload
    image, category = payload["images"][0], payload["category"]

    def messages() -> list[Message]:
        picture = image.open()
        reply = write_vague_description(category=category) if is_vague else describe_by_color(picture, category=category)
        return [make_message("user", picture, payload["question"]), make_message("assistant", reply)]

    return messages


def _listener_messages(example: Example, *, is_target: bool, other: float) -> Callable[[], list[Message]]:
    candidates, target = example.payload["candidates"], example.payload["target"]
    others = [place for place in range(len(candidates)) if place != target]
    place = target if is_target else others[int(other * len(others))]

    def messages() -> list[Message]:
        question = make_color_question(example.payload["images"][0], category=example.payload["category"])
        return [make_message("user", candidates[place].open(), question), make_message("assistant", "yes" if is_target else "no")]

    return messages


def make_color_question(image: StoredImage, *, category: str) -> str:
    """Return the listener's question, which contains a description of the colors in `image`.

    Raises:
        InfraError: The image cannot be opened.
    """
    return parse_description(describe_by_color(image.open(), category=category), category=category).question


def make_tokenizer_texts(categories: Sequence[str]) -> list[str]:
    """Return texts for training a small tokenizer that encodes every word of the game as one token.

    The texts are prompts, replies and questions for each category. Every color occurs in the texts.
    """
    dice, texts = random.Random(0), ["yes", "no"] * 20
    for category in categories:
        texts += [PROMPT.format(category=category), write_vague_description(category=category)]
        for color in COLORS:
            reply = write_color_description([color, *dice.sample([name for name in COLORS if name != color], 2)], category=category)
            texts += [reply, parse_description(reply, category=category).question]
    return texts
