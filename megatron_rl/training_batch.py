"""Turns a step's rollouts into micro-batches with logprobs, values and advantages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from megatron_rl.algo.algorithms import Algorithm, needs_old_logprob_forward, needs_reference
from megatron_rl.algo.distill import add_teacher_rewards, compute_distill_coef
from megatron_rl.algo.gae import values_and_returns
from megatron_rl.algo.rollout_correction import bypasses
from megatron_rl.algo.thoughts import scale_thought_logprobs
from megatron_rl.batching.minibatches import RankShares, add_demonstrations, add_responses, cut_minibatches
from megatron_rl.batching.packing import gather_column, gather_teacher_top
from megatron_rl.batching.token_stats import write_column
from megatron_rl.config import AlgoSettings, Settings
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.routed_experts import RoutingFormat, gather_routed_experts, require_routed_experts
from megatron_rl.types import Image, MicroBatch, Rollout, TokenSequence

BATCH_COLUMN = {
    "old_logprobs": "old_logprob_T", "reference_logprobs": "ref_logprob_T", "teacher_logprobs": "teacher_logprob_T",
    "values": "old_value_T",
}  # fmt: skip
"""Maps the name of each per-token column that a model computes to the name of a MicroBatch
field.
"""


def prepare_training_batch(
    rollouts: list[Rollout], settings: Settings, policy: Policy, critic: Critic | None = None,
    *, algorithm: Algorithm, fetch_images: Callable[[Mapping[int, Sequence[Image]]], None], step: int,
    responses: Sequence[TokenSequence] = (),
) -> list[list[MicroBatch]]:  # fmt: skip
    """Return the micro-batches for each optimizer update, with all loss inputs set.

    If advantages depend on logprobs or values, all sequences are packed, and the advantages are
    computed from the model outputs after packing. In all other cases, the advantages are computed
    first. Sequences with all-zero advantages are then dropped before packing, unless the objective
    has a KL, entropy or distillation term.

    Args:
        rollouts: Rollouts of the step, the same on every rank.
        settings: Settings of this step.
        policy: Policy to train.
        critic: Critic with its own backbone; None without a critic or with a shared backbone.
        algorithm: Algorithm that computes the advantages.
        fetch_images: Function that makes images available to the ranks that encode them. Its
            argument maps each rank to the images that the rank encodes.
        step: Current step, which is also the weight version before the first update.
        responses: Responses of the teacher in contexts of the rollouts, the same on every rank.
    """
    algo = settings.algo
    columns = required_columns(settings, algorithm)
    needs_model_outputs = bool(columns)
    if not needs_model_outputs:
        algorithm.advantage_fn(rollouts, algo)
    demonstrations = policy.demonstrations(step) if policy.demonstrations and settings.distill.data_fraction else responses
    shares = shard_minibatches(rollouts, settings, policy, keep_zero_advantage=needs_model_outputs, demonstrations=demonstrations)
    ends = final_states(rollouts) if algo.bootstrap_truncated else []
    shares_of_ends = shard_minibatches(ends, settings, policy, keep_zero_advantage=True)
    fetch_images(images_by_rank([*shares, *shares_of_ends], policy, has_responses=bool(responses)))
    minibatches = pack_minibatches(rollouts, shares, settings, policy, step=step)
    compute_logprobs_and_values(minibatches, settings, policy, critic, has_values=algorithm.needs_critic)
    compute_final_values(ends, shares_of_ends, policy, critic or policy)
    if needs_model_outputs:
        compute_advantages(rollouts, minibatches, settings, algorithm, columns=columns, step=step)
    if algorithm.needs_critic:
        set_returns_and_update_stats(rollouts, minibatches, algo, critic or policy)
    return minibatches


def required_columns(settings: Settings, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the TokenSequence columns that models must fill before advantages are computed."""
    of_teacher = ("old_logprobs", "teacher_logprobs") if settings.distill.rewards_tokens else ()
    return tuple(dict.fromkeys((*algorithm.required_columns(settings.algo), *of_teacher)))


def shard_minibatches(
    rollouts: list[Rollout], settings: Settings, policy: Policy, *,
    keep_zero_advantage: bool, demonstrations: Sequence[TokenSequence] = (),
) -> list[RankShares]:  # fmt: skip
    """Split the rollouts into mini-batches and shard each mini-batch across data-parallel ranks.

    The demonstrations are divided among the mini-batches. With distill.apply_to=responses, they are
    the teacher's responses.
    Sequences with all-zero advantages are kept if `keep_zero_advantage` is set, or if the objective
    has a KL, entropy or distillation term.
    """
    algo, batch, distill = settings.algo, settings.batch, settings.distill
    has_term = algo.kl_coef > 0 or algo.entropy_coef > 0 or (distill.has_teacher and not distill.generates_responses)
    cut = cut_minibatches(rollouts, batch, keep_zero_advantage=keep_zero_advantage or has_term)
    if distill.listed_sources:
        teacher = [distill.teacher_index(rollout.source) for rollout in rollouts]
        cut = [[replace(item, teacher=teacher[item.origin[0]]) for item in minibatch if item.origin] for minibatch in cut]
    cut = (add_responses if distill.generates_responses else add_demonstrations)(cut, demonstrations, batch)
    return [policy.shard_across_dp(minibatch, max_tokens=batch.micro_batch_tokens) for minibatch in cut]


def images_by_rank(minibatches: Sequence[RankShares], policy: Policy, *, has_responses: bool) -> dict[int, list[Image]]:
    """Return a map from each rank to the images of rollouts that the rank encodes.

    Every rank has the images of demonstrations, but not those of responses in contexts of rollouts
    (`has_responses`).
    """
    needed: dict[int, list[Image]] = {}
    for each in minibatches:
        shares = [[[item for item in part if has_responses or not item.is_demonstration] for part in parts] for parts in each]
        for rank, images in policy.images(shares).items():
            needed.setdefault(rank, []).extend(images)
    return needed


def pack_minibatches(
    rollouts: list[Rollout], minibatches: Sequence[RankShares], settings: Settings, policy: Policy, *, step: int
) -> list[list[MicroBatch]]:
    """Pack this rank's share of each mini-batch into micro-batches.

    The micro-batches contain `on_policy_T` if run.max_staleness > 0, and `logprob_scale_T` if
    algo.thought_logprob_scale is not 1, and `routed_experts_TLK` if algo.routing_replay=rollout.
    Logprobs of a teacher on servers are already columns of the rollouts.
    """
    packed = [policy.pack_local(shares) for shares in minibatches]
    every = [batch for batches in packed for batch in batches]
    if policy.privileged_prompt is not None:
        of_teacher = [policy.pack_local(policy.privileged_prompt.extend(shares, rollouts)) for shares in minibatches]
        for batch, other in zip(every, (other for batches in of_teacher for other in batches), strict=True):
            batch.teacher_batch = other
    if settings.run.max_staleness > 0:
        for batch in every:
            batch.on_policy_T = (gather_column(rollouts, batch, "weight_versions") == step) & batch.mask_T
    if settings.distill.server.is_used:
        for batch in every:
            batch.teacher_logprob_T = gather_column(rollouts, batch, "teacher_logprobs")
            if settings.distill.has_divergence and batch.teacher >= 0 and batch.row_R.numel():
                batch.teacher_top_RK = gather_teacher_top(rollouts, batch)
    if settings.algo.routing_replay == "rollout":
        require_routed_experts(rollouts)
        for batch in every:
            batch.routed_experts_TLK = gather_routed_experts(rollouts, batch, RoutingFormat.from_spec(policy.spec))
    if settings.algo.thought_logprob_scale != 1:
        scale_thought_logprobs(rollouts, settings.algo.thought_logprob_scale)
        for batch in every:
            batch.logprob_scale_T = gather_column(rollouts, batch, "logprob_scale")
    return packed


def compute_logprobs_and_values(
    minibatches: list[list[MicroBatch]], settings: Settings, policy: Policy, critic: Critic | None, *, has_values: bool
) -> None:
    """Compute old logprobs, reference and teacher logprobs, and values before the first update.

    Each model runs one forward pass per micro-batch. Quantities that the settings do not need are
    skipped. With algo.routing_replay=policy, the pass that computes the old logprobs records the
    experts for the updates.
    """
    algo = settings.algo
    has_old, shares_trunk = needs_old_logprob_forward(settings), has_values and critic is None
    every = [batch for batches in minibatches for batch in batches]
    if has_old:
        with policy.routing.recording(every) if policy.routing and algo.routing_replay == "policy" else nullcontext():
            if shares_trunk:
                fill_column(minibatches, policy.logprobs_and_values, "old_logprob_T", "old_value_T")
            else:
                fill_column(minibatches, policy.logprobs, "old_logprob_T")
    elif shares_trunk:
        fill_column(minibatches, policy.values, "old_value_T")
    if critic is not None:
        fill_column(minibatches, critic.values, "old_value_T")
    if needs_reference(algo):
        fill_column(minibatches, partial(policy.logprobs, weights="reference"), "ref_logprob_T")
    if settings.distill.is_self:
        policy.teach_itself()
    if settings.distill.is_local:
        fill_column(minibatches, partial(policy.logprobs, weights="teacher"), "teacher_logprob_T")


def final_states(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return a rollout for each final state, with this state as its only sequence."""
    return [
        replace(rollout, sequences=[rollout.final_state], turns=[], final_state=None)
        for rollout in rollouts
        if rollout.final_state is not None
    ]


def compute_final_values(ends: Sequence[Rollout], shares: Sequence[RankShares], policy: Policy, critic: Critic | Policy) -> None:
    """Compute the critic's values of final states that belong to rollouts to train on.

    All ranks must call this function together.

    Args:
        ends: Result of `final_states`.
        shares: Result of `shard_minibatches` for `ends`.
        policy: Packs the final states.
        critic: Computes the values.
    """
    if shares:
        batches = [batch for each in shares for batch in policy.pack_local(each)]
        write_column(ends, batches, critic.values(batches), column="values")


def fill_column(minibatches: list[list[MicroBatch]], compute: Callable[[list[MicroBatch]], list[torch.Tensor]], *names: str) -> None:
    """Run `compute` on each mini-batch and store the results in the MicroBatch fields `names`."""
    for batches in minibatches:
        for batch, numbers in zip(batches, compute(batches), strict=True):
            for name, number_T in zip(names, numbers.view(len(names), -1), strict=True):
                setattr(batch, name, number_T)


def compute_advantages(
    rollouts: list[Rollout], minibatches: list[list[MicroBatch]], settings: Settings, algorithm: Algorithm, *,
    columns: Sequence[str], step: int,
) -> None:  # fmt: skip
    """Compute advantages that depend on the logprobs or values in `columns`.

    This function writes the model outputs to the sequences, then the advantages to the sequences
    and the micro-batches. If the rollout correction bypasses old logprobs, the engine's logprobs
    are used in place of old logprobs.
    """
    every = [batch for batches in minibatches for batch in batches]
    fields = BATCH_COLUMN | ({"old_logprobs": "rollout_logprob_T"} if bypasses(settings.algo) else {})
    for column in columns:
        batches = [batch for batch in every if column != "teacher_logprobs" or batch.teacher >= 0]
        write_column(rollouts, batches, [getattr(batch, fields[column]) for batch in batches], column=column)
    algorithm.advantage_fn(rollouts, settings.algo)
    if settings.distill.rewards_tokens:
        add_teacher_rewards(rollouts, coef=compute_distill_coef(settings.distill, step=step))
    for batch in every:
        batch.advantage_T = gather_column(rollouts, batch, "advantages")


def set_returns_and_update_stats(
    rollouts: list[Rollout], minibatches: list[list[MicroBatch]], algo: AlgoSettings, critic: Critic | Policy
) -> None:
    """Write returns to the micro-batches and update the value head's return statistics."""
    for batches in minibatches:
        for batch in batches:
            batch.return_T = gather_column(rollouts, batch, "returns")
    critic.update_return_stats(values_and_returns(rollouts, algo)[1])
