"""The packed batch of the parity tests, built identically in every process.

It contains a text-only sequence, sequences with two images of different sizes, an image and a
complete prompt shared by two sequences, the same prompt with its images swapped, and a sequence
that branches from another one.
"""

import numpy as np
from PIL import Image as Pillow

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence


def make_picture(seed: int, width: int, height: int) -> Pillow.Image:
    """Return colored noise in 14 x 14 blocks.

    Sides are multiples of 28, so that nothing is resized.
    """
    blocks = np.random.default_rng(seed).integers(0, 255, (height // 14, width // 14, 3))
    return Pillow.fromarray(np.kron(blocks, np.ones((14, 14, 1))).astype(np.uint8))


def user_message(text: str, *pictures: Pillow.Image) -> dict:
    return {"role": "user", "content": [*({"type": "image", "image": p} for p in pictures), {"type": "text", "text": text}]}


def make_prompts(renderer: Renderer) -> list[TokenSequence]:
    wide, tall = make_picture(1, 112, 56), make_picture(2, 56, 140)
    return [
        renderer.prompt([user_message("No picture here, only words.")]),
        renderer.prompt([user_message("What is this?", wide)]),
        renderer.prompt([user_message("Compare.", tall, wide)]),
        renderer.prompt([user_message("Again.", wide)]),
        renderer.prompt([user_message("Compare.", tall, wide)]),
        renderer.prompt([user_message("Compare.", wide, tall)]),
    ]


def make_pack_item(context: TokenSequence, *, advantage: float = 0.0, weight: float = 1.0, denominator: int = 1) -> PackItem:
    """Return a pack item in which all sampled tokens have the same advantage."""
    context.set_column("advantages", [advantage * sampled for sampled in context.loss_mask])
    return PackItem(context, weight=weight, denominator=denominator)


def make_example_items(renderer: Renderer) -> list[PackItem]:
    """Return sequences of different lengths with 40 to 76 sampled tokens each.

    Weights and advantages differ between sequences.
    """
    made: list[PackItem] = []
    for index in range(7):
        context = make_prompts(renderer)[index] if index < 6 else branch_from(renderer, made[1].sequence)
        generator = np.random.default_rng(index)
        sampled = generator.integers(0, 256, 40 + 6 * index).tolist()
        context.extend(sampled, logprobs=[-1.0] * len(sampled))
        advantage = (1.5, -1.0, 0.5, -0.7, 0.9, -1.2, 0.8)[index]
        made.append(make_pack_item(context, advantage=advantage, weight=0.5 + 0.25 * index, denominator=len(sampled)))
    return made


def branch_from(renderer: Renderer, parent: TokenSequence) -> TokenSequence:
    """Return a sequence that shares its start with an earlier sequence, including half of its
    response, and continues with an image.
    """
    tokens = parent.token_ids[: len(parent.token_ids) - sum(parent.loss_mask) // 2]
    more, made = renderer.prompt([user_message("Go on.", make_picture(2, 56, 140))]), TokenSequence()
    made.extend(tokens + more.token_ids, images=(*parent.images, *more.images))
    return made
