"""Table of algorithms, with the functions and properties of each algorithm.

No other module branches on algo.name. To add an algorithm, write an advantage function
(advantages.py) or a policy loss (policy_losses.py), and add a row to ALGORITHMS. Constants of an
algorithm are set by a preset in configs/algo.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.algo import advantages, policy_losses
from megatron_rl.algo.advantages import TURN_SCHEMES, AdvantageFn
from megatron_rl.algo.gae import generalized_advantages
from megatron_rl.algo.kl import ESTIMATORS
from megatron_rl.algo.policy_losses import ClipBounds, PolicyLossFn
from megatron_rl.algo.rollout_correction import bypasses, check_correction
from megatron_rl.config import AlgoSettings, Settings, require, require_choice
from megatron_rl.types import LossInputs


@dataclass(slots=True, frozen=True, kw_only=True)
class Algorithm:
    """Functions and supported features of one algorithm."""

    advantage_fn: AdvantageFn
    """Computes the advantages for all scored rollouts of a step."""
    policy_loss: PolicyLossFn = policy_losses.ppo_clip
    """Computes the policy loss for each sampled token."""
    clip_bounds: Callable[[LossInputs, AlgoSettings], ClipBounds] = policy_losses.ratio_bounds
    """Returns masks of the tokens outside the trust region of the policy loss. Only metrics use
    these masks."""
    needs_group: bool = True
    """True if advantages are relative to the other rollouts of the group. If true, a rollout is
    filtered out unless its group contains another scored rollout.
    """
    needs_critic: bool = False
    """True if advantages use a critic's values. If true, the critic is trained on the returns that
    `advantage_fn` computes.
    """
    needs_teacher: bool = False
    """True if only a teacher changes the policy (distill.teacher)."""
    supports_turn_credit: bool = False
    """True if values of algo.turn_credit other than broadcast are supported."""
    supports_dual_clip: bool = False
    """True if the policy loss uses algo.clip_ratio_c."""

    def required_columns(self, algo: AlgoSettings) -> tuple[str, ...]:
        """Return the TokenSequence columns that models must fill before `advantage_fn` runs."""
        logprobs = ("old_logprobs", "reference_logprobs") if algo.use_kl_in_reward else ()
        return (*logprobs, "values") if self.needs_critic else logprobs


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(advantage_fn=advantages.grpo, supports_turn_credit=True, supports_dual_clip=True),
    "rloo": Algorithm(advantage_fn=advantages.rloo, supports_dual_clip=True),
    "opo": Algorithm(advantage_fn=advantages.opo, supports_dual_clip=True),
    "reinforce_pp": Algorithm(advantage_fn=advantages.reinforce_pp, needs_group=False, supports_dual_clip=True),
    "ppo": Algorithm(advantage_fn=generalized_advantages, needs_group=False, needs_critic=True, supports_dual_clip=True),
    "ppo_turn": Algorithm(
        advantage_fn=generalized_advantages,
        policy_loss=policy_losses.ppo_turn_clip,
        clip_bounds=policy_losses.turn_ratio_bounds,
        needs_group=False,
        needs_critic=True,
        supports_dual_clip=True,
    ),
    "gspo": Algorithm(
        advantage_fn=advantages.grpo,
        policy_loss=policy_losses.gspo,
        clip_bounds=policy_losses.sequence_ratio_bounds,
        supports_dual_clip=True,
    ),
    "cispo": Algorithm(advantage_fn=advantages.grpo, policy_loss=policy_losses.cispo, supports_turn_credit=True),
    "sapo": Algorithm(
        advantage_fn=advantages.grpo, policy_loss=policy_losses.sapo, supports_turn_credit=True, clip_bounds=policy_losses.no_bounds
    ),
    "gmpo": Algorithm(advantage_fn=advantages.grpo, policy_loss=policy_losses.gmpo, clip_bounds=policy_losses.log_ratio_bounds),
    "distill": Algorithm(advantage_fn=advantages.no_advantage, needs_group=False, needs_teacher=True, supports_dual_clip=True),
    "dppo": Algorithm(
        advantage_fn=advantages.grpo, policy_loss=policy_losses.dppo, supports_turn_credit=True, clip_bounds=policy_losses.dppo_bounds
    ),
}
"""Algorithms, keyed by algo.name. DAPO, Dr. GRPO and GiGPO are presets of grpo (configs/algo).
With distill, the policy learns from a teacher alone, and rewards are only measured."""


def check_algorithm(algo: AlgoSettings, algorithms: Mapping[str, Algorithm] = ALGORITHMS) -> None:
    """Raise ValueError if a setting has an unknown value or two settings are incompatible."""
    require_choice("algo.name", algo.name, tuple(algorithms))
    require_choice("algo.turn_credit", algo.turn_credit, tuple(TURN_SCHEMES))
    require_choice("algo.kl_estimator", algo.kl_estimator, tuple(ESTIMATORS))
    check_correction(algo)
    by_turn = [name for name, row in algorithms.items() if row.supports_turn_credit]
    remedy = f"algo.name={algo.name} assigns one advantage per episode; use broadcast, or one of the algorithms {', '.join(by_turn)}"
    require(algo.turn_credit == "broadcast" or algo.name in by_turn, "algo.turn_credit", algo.turn_credit, remedy)
    has_values = not algo.bootstrap_truncated or algorithms[algo.name].needs_critic
    remedy = f"algo.name={algo.name} has no critic; use ppo, or set it to false"
    require(has_values, "algo.bootstrap_truncated", algo.bootstrap_truncated, remedy)
    clips = algo.clip_ratio_c == 0 or algorithms[algo.name].supports_dual_clip
    require(clips, "algo.clip_ratio_c", algo.clip_ratio_c, f"has no effect with algo.name={algo.name}; leave it at 0")


def needs_old_logprob_forward(settings: Settings) -> bool:
    """Return True if the step needs a forward pass for old logprobs before its first update."""
    algo, num_updates = settings.algo, settings.batch.minibatches * settings.batch.epochs
    in_reward = algo.use_kl_in_reward or settings.distill.rewards_tokens
    return (num_updates > 1 or in_reward) and not bypasses(algo)


def needs_reference(algo: AlgoSettings) -> bool:
    """Return True if the settings need logprobs of the reference model."""
    return algo.kl_coef > 0
