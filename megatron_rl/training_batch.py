"""From a step's rollouts to micro-batches that are ready for the loss: packing, images, logprobs and values, advantages."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from megatron_rl.algo.algorithms import Algorithm, needs_old_logprob_forward, needs_reference
from megatron_rl.algo.gae import values_and_returns
from megatron_rl.algo.rollout_correction import bypasses
from megatron_rl.algo.thoughts import scale_thought_logprobs
from megatron_rl.batching.minibatches import RankShares, cut_minibatches
from megatron_rl.batching.packing import gather_column
from megatron_rl.batching.token_stats import write_column
from megatron_rl.config import AlgoSettings, Settings
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.types import Image, MicroBatch, Rollout

BATCH_COLUMN = {"old_logprobs": "old_logprob_T", "reference_logprobs": "ref_logprob_T", "values": "old_value_T"}
"""Maps each per-token column computed by a model to its field in MicroBatch."""


def prepare_training_batch(
    rollouts: list[Rollout], settings: Settings, policy: Policy, critic: Critic | None = None,
    *, algorithm: Algorithm, fetch_images: Callable[[Mapping[int, Sequence[Image]]], None], step: int,
) -> list[list[MicroBatch]]:  # fmt: skip
    """Return the micro-batches of each optimizer update, with everything that the loss reads.

    Args:
        fetch_images: Brings images, by rank, to the ranks that encode them.
        step: Version of the weights that the first update changes.

    Sequences whose advantages are all zero are left out of packing where nothing but the advantage moves the policy, so advantages come
    first. Where they depend on logprobs or values, these are computed of all sequences before, and the advantages follow.
    """
    algo = settings.algo
    needs_model_outputs = bool(algorithm.required_columns(algo))
    if not needs_model_outputs:
        algorithm.advantage_fn(rollouts, algo)
    shares = shard_minibatches(rollouts, settings, policy, keep_zero_advantage=needs_model_outputs)
    fetch_images(images_by_rank(shares, policy))
    minibatches = pack_minibatches(rollouts, shares, settings, policy, step=step)
    compute_logprobs_and_values(minibatches, settings, policy, critic, has_values=algorithm.needs_critic)
    if needs_model_outputs:
        compute_advantages(rollouts, minibatches, algo, algorithm)
    if algorithm.needs_critic:
        set_returns_and_update_stats(rollouts, minibatches, algo, critic or policy)
    return minibatches


def shard_minibatches(rollouts: list[Rollout], settings: Settings, policy: Policy, *, keep_zero_advantage: bool) -> list[RankShares]:
    """Cut the step into minibatches and share each of them out over data-parallel ranks.

    Sequences without an advantage are kept with `keep_idle`, and where the KL or the entropy moves the policy, too.
    """
    algo, batch = settings.algo, settings.batch
    keeps_all = keep_zero_advantage or algo.kl_coef > 0 or algo.entropy_coef > 0
    cut = cut_minibatches(rollouts, batch, keep_zero_advantage=keeps_all)
    return [policy.shard_across_dp(minibatch, max_tokens=batch.micro_batch_tokens) for minibatch in cut]


def images_by_rank(minibatches: Sequence[RankShares], policy: Policy) -> dict[int, list[Image]]:
    """Return, by rank, the images that it encodes in any of these minibatches."""
    needed: dict[int, list[Image]] = {}
    for shares in minibatches:
        for rank, images in policy.images(shares).items():
            needed.setdefault(rank, []).extend(images)
    return needed


def pack_minibatches(
    rollouts: list[Rollout], minibatches: Sequence[RankShares], settings: Settings, policy: Policy, *, step: int
) -> list[list[MicroBatch]]:
    """Pack this rank's share of each minibatch, with the columns that settings ask for."""
    packed = [policy.pack_local(shares) for shares in minibatches]
    every = [batch for batches in packed for batch in batches]
    if settings.run.max_staleness > 0:
        for batch in every:
            batch.on_policy_T = (gather_column(rollouts, batch, "weight_versions") == step) & batch.mask_T
    if settings.algo.thought_logprob_scale != 1:
        scale_thought_logprobs(rollouts, settings.algo.thought_logprob_scale)
        for batch in every:
            batch.logprob_scale_T = gather_column(rollouts, batch, "logprob_scale")
    return packed


def compute_logprobs_and_values(
    minibatches: list[list[MicroBatch]], settings: Settings, policy: Policy, critic: Critic | None, *, has_values: bool
) -> None:
    """Compute old logprobs, reference logprobs and values for every micro-batch before the first update, one forward pass per model."""
    algo, batch = settings.algo, settings.batch
    has_old, shares_trunk = needs_old_logprob_forward(algo, num_updates=batch.minibatches * batch.epochs), has_values and critic is None
    if has_old and shares_trunk:
        fill_column(minibatches, policy.logprobs_and_values, "old_logprob_T", "old_value_T")
    elif has_old:
        fill_column(minibatches, policy.logprobs, "old_logprob_T")
    elif shares_trunk:
        fill_column(minibatches, policy.values, "old_value_T")
    if critic is not None:
        fill_column(minibatches, critic.values, "old_value_T")
    if needs_reference(algo):
        fill_column(minibatches, partial(policy.logprobs, weights="reference"), "ref_logprob_T")


def fill_column(minibatches: list[list[MicroBatch]], compute: Callable[[list[MicroBatch]], list[torch.Tensor]], *names: str) -> None:
    """Write the field of this name, or the fields of these, that `compute` returns for each micro-batch."""
    for batches in minibatches:
        for batch, numbers in zip(batches, compute(batches), strict=True):
            for name, number_T in zip(names, numbers.view(len(names), -1), strict=True):
                setattr(batch, name, number_T)


def compute_advantages(rollouts: list[Rollout], minibatches: list[list[MicroBatch]], algo: AlgoSettings, algorithm: Algorithm) -> None:
    """Write the computed columns back to the sequences, compute advantages from them, and put these into the micro-batches."""
    every = [batch for batches in minibatches for batch in batches]
    fields = BATCH_COLUMN | ({"old_logprobs": "rollout_logprob_T"} if bypasses(algo) else {})
    for column in algorithm.required_columns(algo):
        write_column(rollouts, every, [getattr(batch, fields[column]) for batch in every], column=column)
    algorithm.advantage_fn(rollouts, algo)
    for batch in every:
        batch.advantage_T = gather_column(rollouts, batch, "advantages")


def set_returns_and_update_stats(
    rollouts: list[Rollout], minibatches: list[list[MicroBatch]], algo: AlgoSettings, critic: Critic | Policy
) -> None:
    """Put the returns into the micro-batches, and into the statistics that the value head normalizes by."""
    for batches in minibatches:
        for batch in batches:
            batch.return_T = gather_column(rollouts, batch, "returns")
    critic.update_return_stats(values_and_returns(rollouts, algo)[1])
