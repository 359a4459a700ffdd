"""What tells one algorithm from another. The names are rows of algo/algorithms.py, which checks them; presets are in configs/algo."""

import math
from dataclasses import dataclass

from megatron_rl.config.checks import require


@dataclass(kw_only=True, slots=True)
class AlgoSettings:
    """How rollouts are credited and what is minimized."""

    name: str = "grpo"
    """A row of algo/algorithms.py: how rollouts are credited and which surrogate is minimized."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); Dr. GRPO does not."""
    std_eps: float = 1e-6
    """Added to the standard deviation that advantages are divided by."""
    turns: str = "broadcast"
    """What a turn's tokens are credited with (algo/credit.py): the episode's advantage (broadcast), that of the outcome plus the turn's own
    (outcome_and_turn), that of what was still to be earned from the turn on (return_to_go), or the episode's plus how the return from the
    turn on compares with others from the same state (same_state, GiGPO)."""
    turn_discount: float = 1.0
    """Factor on each later turn's gain in return_to_go and same_state: GiGPO's gamma."""
    omega: float = 1.0
    """Weight of the comparison with others from the same state beside the episode's advantage in same_state."""
    clip_low: float = 0.2
    """Ratios below 1 - clip_low teach no further down; for gmpo in log space, for dppo a difference of probabilities."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high teach no further up; DAPO's clip-higher is a value above clip_low."""
    dual_clip: float = 0.0
    """Bound on ratio * |advantage| for negative advantages (arXiv 1912.09729), e.g. 3; 0 is off."""
    sapo_tau_positive: float = 1.0
    """Steepness of SAPO's gate for positive advantages."""
    sapo_tau_negative: float = 1.05
    """Steepness of SAPO's gate for negative advantages."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference policy, in the loss or in the reward."""
    kl_estimator: str = "k3"
    """Estimate of the KL term of the loss (algo/kl.py): k1, k2 or k3."""
    kl_in_reward: bool = False
    """Take kl_coef * (old - reference logprob) off every token's reward instead of adding a KL term to the loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    correction: str = "none"
    """What is done about engine and trainer disagreeing on a token's probability: a row of algo/corrections.py."""
    correction_cap: float = 2.0
    """Largest weight that a correction gives a token."""
    temperature: float = 1.0
    """Temperature of the policy as a distribution: sampling and training use the same one."""

    def __post_init__(self) -> None:
        for key, value in (("std_eps", self.std_eps), ("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            require(0 <= value < math.inf, f"algo.{key}", value, "must be a finite number that is not negative")
        remedy = "must lie in [0.01, 2]: vLLM changes or refuses others"
        require(0.01 <= self.temperature <= 2, "algo.temperature", self.temperature, remedy)
        require(0 <= self.omega < math.inf, "algo.omega", self.omega, "must be a finite number that is not negative")
        require(0 <= self.turn_discount <= 1, "algo.turn_discount", self.turn_discount, "must lie in [0, 1]")
        require(self.dual_clip == 0 or self.dual_clip > 1, "algo.dual_clip", self.dual_clip, "must be above 1, or 0 to switch it off")
        require(0 <= self.clip_low <= 1, "algo.clip_low", self.clip_low, "must lie in [0, 1]")
        require(self.clip_high >= 0, "algo.clip_high", self.clip_high, "must not be negative")
        for key, value in (("sapo_tau_positive", self.sapo_tau_positive), ("sapo_tau_negative", self.sapo_tau_negative)):
            require(value > 0, f"algo.{key}", value, "must be positive")
        require(self.correction_cap > 0, "algo.correction_cap", self.correction_cap, "must be positive")
        require(self.kl_coef > 0 or not self.kl_in_reward, "algo.kl_in_reward", True, "needs algo.kl_coef, the weight of that KL")
