"""Everything that tells one algorithm from another: a row of a table. Nothing else asks for algo.name.

To add one: write its credit (advantages.py) or its surrogate (policy_losses.py) and a row here; a preset in configs/algo gives its
constants.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.algo import advantages, policy_losses
from megatron_rl.algo.advantages import TURN_SCHEMES, Credit
from megatron_rl.algo.gae import generalized_advantages
from megatron_rl.algo.kl import ESTIMATORS
from megatron_rl.algo.policy_losses import Bounds, Surrogate
from megatron_rl.algo.rollout_correction import bypasses, check_correction
from megatron_rl.config import AlgoSettings, require, require_choice
from megatron_rl.types import Rows


@dataclass(slots=True, frozen=True, kw_only=True)
class Algorithm:
    credit: Credit
    surrogate: Surrogate = policy_losses.clipped
    bounds: Callable[[Rows, AlgoSettings], Bounds] = policy_losses.ratio_bounds
    """Where the surrogate's trust region ends; measured, not trained on."""
    needs_peers: bool = True
    """Credit compares the members of a group: a rollout whose peers all failed is not trained on."""
    needs_values: bool = False
    """Credit reads a critic's values, and the critic learns from its returns."""
    by_turn: bool = False
    """algo.turns may be other than broadcast."""
    dual_clips: bool = False
    """The surrogate reads algo.dual_clip."""

    def reads(self, algo: AlgoSettings) -> tuple[str, ...]:
        """Columns of Context that networks must fill before `credit`."""
        logprobs = ("old_logprobs", "reference_logprobs") if algo.kl_in_reward else ()
        return (*logprobs, "values") if self.needs_values else logprobs


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(credit=advantages.group_relative, by_turn=True, dual_clips=True),
    "rloo": Algorithm(credit=advantages.leave_one_out, dual_clips=True),
    "opo": Algorithm(credit=advantages.length_weighted, dual_clips=True),
    "reinforce_pp": Algorithm(credit=advantages.whitened_returns, needs_peers=False, dual_clips=True),
    "ppo": Algorithm(credit=generalized_advantages, needs_peers=False, needs_values=True, dual_clips=True),
    "ppo_turn": Algorithm(
        credit=generalized_advantages,
        surrogate=policy_losses.turn_clipped,
        bounds=policy_losses.turn_ratio_bounds,
        needs_peers=False,
        needs_values=True,
        dual_clips=True,
    ),
    "gspo": Algorithm(
        credit=advantages.group_relative,
        surrogate=policy_losses.sequence_clipped,
        bounds=policy_losses.sequence_ratio_bounds,
        dual_clips=True,
    ),
    "cispo": Algorithm(credit=advantages.group_relative, surrogate=policy_losses.stopped_ratio, by_turn=True),
    "sapo": Algorithm(
        credit=advantages.group_relative, surrogate=policy_losses.sigmoid_gated, by_turn=True, bounds=policy_losses.no_bounds
    ),
    "gmpo": Algorithm(credit=advantages.group_relative, surrogate=policy_losses.geometric, bounds=policy_losses.log_ratio_bounds),
    "dppo": Algorithm(
        credit=advantages.group_relative, surrogate=policy_losses.divergence_bounded, by_turn=True, bounds=policy_losses.divergence_bounds
    ),
}
"""DAPO, Dr. GRPO and GiGPO are grpo with other settings (configs/algo)."""


def check_algorithm(algo: AlgoSettings, algorithms: Mapping[str, Algorithm] = ALGORITHMS) -> None:
    """ValueError: a name that is in no table, or settings that do not go together."""
    require_choice("algo.name", algo.name, tuple(algorithms))
    require_choice("algo.turns", algo.turns, tuple(TURN_SCHEMES))
    require_choice("algo.kl_estimator", algo.kl_estimator, tuple(ESTIMATORS))
    check_correction(algo)
    by_turn = [name for name, row in algorithms.items() if row.by_turn]
    remedy = f"algo.name={algo.name} credits whole episodes; use broadcast, or one of {', '.join(by_turn)}"
    require(algo.turns == "broadcast" or algo.name in by_turn, "algo.turns", algo.turns, remedy)
    clips = algo.dual_clip == 0 or algorithms[algo.name].dual_clips
    require(clips, "algo.dual_clip", algo.dual_clip, f"has no part in algo.name={algo.name}; leave it at 0")


def needs_old(algo: AlgoSettings, *, num_updates: int) -> bool:
    """Whether the trainer's logprobs before the step's first update are a forward pass of their own."""
    return (num_updates > 1 or algo.kl_in_reward) and not bypasses(algo)


def needs_reference(algo: AlgoSettings) -> bool:
    return algo.kl_coef > 0
