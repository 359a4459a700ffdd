"""Responses that a teacher generates in the contexts of the policy's turns.

The rollout engine contains the teacher's weights. The policy then learns from the thoughts of these
responses (GTR-Turbo, arXiv 2512.13043, the SFT variant).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from PIL.Image import Image as Picture

from megatron_rl.errors import GracefulStop, InfraError
from megatron_rl.rollout.conversation import copy_prefix
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.episode import derive_seed
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Image, Rollout, Status, StopReason, TokenSequence

_CHOICE, _RESPONSE = 1, 2
"""Last part of the seeds of the choice of turns and of responses. Requests of episodes have shorter
seeds.
"""


def choose_turns(rollouts: Sequence[Rollout], *, fraction: float, seed: int) -> dict[int, list[int]]:
    """Return the indices of random turns that are trained on, keyed by the index of the rollout.

    `fraction` is the fraction of all these turns, rounded to whole turns.
    """
    turns = [
        (index, number)
        for index, rollout in enumerate(rollouts)
        if rollout.is_trained_on
        for number, turn in enumerate(rollout.turns)
        if any(rollout.sequences[turn.sequence].loss_mask[slice(*turn.token_span)])
    ]
    places = {place: (rollouts[place[0]].group, rollouts[place[0]].sample_index, place[1]) for place in turns}
    drawn = sorted(turns, key=lambda place: derive_seed(seed, *places[place], _CHOICE))[: round(fraction * len(turns))]
    chosen: dict[int, list[int]] = {}
    for index, number in sorted(drawn):
        chosen.setdefault(index, []).append(number)
    return chosen


def generate_responses(manager: RolloutManager, rollouts: Sequence[Rollout], *, fraction: float, step: int) -> list[Rollout]:
    """Generate responses in the contexts of a fraction of a step's turns.

    Every engine responds in the contexts of its own rollouts. All ranks must call this together.

    Returns:
        A rollout for each rollout with responses, on every rank. Each of its sequences is the
        context of a turn and the response, of which only the thoughts have a loss
        (Task.find_action). If the engine fails, the rollout has Status.FAILED.

    Raises:
        GracefulStop: On every rank, if the grace period of an engine ended before it had finished.
    """
    seed = manager.episode_settings.at_step(step).seed
    chosen = choose_turns(rollouts, fraction=fraction, seed=seed)
    limit = asyncio.Semaphore(manager.engine_rank.max_episodes)

    async def run_local() -> list[Rollout]:
        own = {index: turns for index, turns in chosen.items() if manager.collectives.is_local(rollouts[index])}
        return await asyncio.gather(*(_respond(manager, rollouts[index], turns, seed=seed, limit=limit) for index, turns in own.items()))

    found = manager.collectives.gather_rollouts(manager.engine.run(manager.callbacks.run_with_grace(run_local)))
    if len(found) < len(chosen):
        raise GracefulStop
    return sorted(found, key=lambda rollout: (rollout.group, rollout.sample_index))


async def _respond(manager: RolloutManager, rollout: Rollout, turns: Sequence[int], *, seed: int, limit: asyncio.Semaphore) -> Rollout:
    """Return a rollout with the teacher's response in the context of each of the turns."""
    own_ids = {"task": rollout.task, "example_id": rollout.example_id, "group": rollout.group, "sample_index": rollout.sample_index}
    try:
        sequences = await asyncio.gather(*(_respond_in_turn(manager, rollout, turn, seed=seed, limit=limit) for turn in turns))
    except InfraError as fault:
        return Rollout(**own_ids, status=Status.FAILED, stop_reason=StopReason.PERMANENT_INFRA_ERROR, reason=str(fault))
    return Rollout(**own_ids, sequences=sequences)


async def _respond_in_turn(manager: RolloutManager, rollout: Rollout, number: int, *, seed: int, limit: asyncio.Semaphore) -> TokenSequence:
    renderer, settings, turn = manager.renderer, manager.episode_settings, rollout.turns[number]
    start = turn.token_span[0]
    sequence = copy_prefix(rollout.sequences[turn.sequence], start, image_token_id=renderer.image_token_id)
    sampling = SamplingSettings(
        min(settings.max_new_tokens, settings.max_sequence_tokens - start), settings.temperature,
        seed=derive_seed(seed, rollout.group, rollout.sample_index, number, _RESPONSE), stop=tuple(manager.task.stop),
    )  # fmt: skip
    async with limit:
        images = [replace(image, patch_PC=renderer.patches(image, _pixels)) for image in sequence.images]
        completion = await manager.engine.generate(sequence.token_ids, images, sampling)
    sequence.extend(completion.token_ids, logprobs=completion.logprobs, versions=completion.weight_versions)
    char = manager.task.find_action(renderer.decode_response(completion.token_ids))
    if char is not None:
        sequence.exclude_from_loss(start + renderer.char_to_token(completion.token_ids, char), len(sequence.token_ids))
    return sequence


def _pixels(image: Image) -> Picture:
    assert image.pil is not None, "an engine has the images of its own rollouts"
    return image.pil


def sequences_with_loss(responses: Sequence[Rollout]) -> list[TokenSequence]:
    """Return the sequences of responses with at least one thought."""
    return [sequence for rollout in responses for sequence in rollout.sequences if any(sequence.loss_mask)]
