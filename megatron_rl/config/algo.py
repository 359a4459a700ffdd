"""What tells one algorithm from another. The names are rows of algo/algorithms.py, which checks them; presets are in configs/algo."""

import math
from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice


@dataclass(kw_only=True, slots=True)
class AlgoSettings:
    """How rollouts are credited and what is minimized."""

    name: str = "grpo"
    """A row of algo/algorithms.py: how rollouts are credited and which surrogate is minimized."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); Dr. GRPO does not."""
    std_eps: float = 1e-6
    """Added to the standard deviation that advantages are divided by."""
    turn_credit: str = "broadcast"
    """What a turn's tokens are credited with (algo/advantages.py): the episode's advantage (broadcast), that of the outcome plus the
    turn's own (outcome_and_turn), that of what was still to be earned from the turn on (return_to_go), or the episode's plus how the
    return from the turn on compares with others from the same state (gigpo)."""
    gamma: float = 1.0
    """Factor on what comes one step later: on a turn's gain in return_to_go and gigpo (GiGPO's gamma), on a turn or a token as
    algo.gae_level says with a critic (PPO's gamma)."""
    gigpo_step_weight: float = 1.0
    """Weight of the comparison with others from the same state beside the episode's advantage in gigpo."""
    gae_level: str = "tokens"
    """What is a step to a critic: each sampled token (tokens), or a whole turn, valued at its prompt's last token (turns)."""
    lam: float = 1.0
    """How far a step's advantage looks ahead (arXiv 1506.02438): 0 trusts the critic after one step, 1 never."""
    whiten_advantages: bool = True
    """Shift and scale a critic's advantages to mean 0 and deviation 1 over the steps of all rollouts that are trained on."""
    clip_ratio_low: float = 0.2
    """Ratios below 1 - clip_ratio_low teach no further down; for gmpo in log space, for dppo a difference of probabilities."""
    clip_ratio_high: float = 0.2
    """Ratios above 1 + clip_ratio_high teach no further up; DAPO's clip-higher is a value above clip_ratio_low."""
    clip_ratio_c: float = 0.0
    """Bound on ratio * |advantage| for negative advantages (arXiv 1912.09729), e.g. 3; 0 is off."""
    sapo_tau_positive: float = 1.0
    """Steepness of SAPO's gate for positive advantages."""
    sapo_tau_negative: float = 1.05
    """Steepness of SAPO's gate for negative advantages."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference policy, in the loss or in the reward."""
    kl_estimator: str = "k3"
    """Estimate of the KL term of the loss (algo/kl.py): k1, k2 or k3."""
    use_kl_in_reward: bool = False
    """Take kl_coef * (old - reference logprob) off every token's reward instead of adding a KL term to the loss."""
    kl_target: float = 0.0
    """KL divergence a token, as policy/kl_ref has it, that kl_coef is moved towards after every step, e.g. 0.02; 0 leaves kl_coef."""
    kl_horizon: int = 10_000
    """Episodes in which kl_coef is changed by a fifth where the KL divergence is a fifth or more off kl_target; less for less."""
    thought_logprob_scale: float = 1.0
    """Factor on the log-probability of the tokens before a turn's action, in what the surrogate compares; RL4VLM has 0.5 and 0.2. The ratio
    is then no longer that of what was sampled (docs/algorithm.md)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    rollout_correction: str = "none"
    """What is done about engine and trainer disagreeing on a token's probability: rows of algo/rollout_correction.py, joined by +, e.g.
    bypass+geo_mask. Below, r is the trainer's probability of a token over the engine's."""
    rollout_correction_level: str = "sequences"
    """What a correction takes for a sequence: a whole context (contexts), or each turn in it (turns)."""
    is_weight_cap: float = 2.0
    """Largest weight that token_tis and sequence_tis give."""
    token_mask_low: float = 0.5
    """Tokens whose r is below are masked by token_mask."""
    token_mask_high: float = 5.0
    """Tokens whose r is above are masked by token_mask."""
    sequence_mask_low: float = 0.0
    """Sequences whose product of r is below are masked by sequence_mask."""
    sequence_mask_high: float = 3.0
    """Sequences whose product of r is above are masked by sequence_mask."""
    geo_mask_low: float = 0.99
    """Sequences whose geometric mean of r is below are masked by geo_mask."""
    geo_mask_high: float = 1.01
    """Sequences whose geometric mean of r is above are masked by geo_mask."""
    k3_mask_high: float = 0.01
    """Sequences whose mean of r - 1 - log r is above are masked by k3_mask."""
    opsm_delta: float = 0.5
    """Sequences of negative advantage whose mean of engine logprob - logprob is above are masked by opsm."""
    temperature: float = 1.0
    """Temperature of the policy as a distribution: sampling and training use the same one."""

    def __post_init__(self) -> None:
        for key, value in (("std_eps", self.std_eps), ("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            require(0 <= value < math.inf, f"algo.{key}", value, "must be a finite number that is not negative")
        require(0 <= self.kl_target < math.inf, "algo.kl_target", self.kl_target, "must be a finite number that is not negative")
        require(self.kl_target == 0 or self.kl_coef > 0, "algo.kl_target", self.kl_target, "needs algo.kl_coef, the weight to begin with")
        require(self.kl_horizon >= 1, "algo.kl_horizon", self.kl_horizon, "must be at least 1")
        remedy = "must lie in [0.01, 2]: vLLM changes or refuses others"
        require(0.01 <= self.temperature <= 2, "algo.temperature", self.temperature, remedy)
        require_choice("algo.gae_level", self.gae_level, ("tokens", "turns"))
        require(
            0 <= self.gigpo_step_weight < math.inf,
            "algo.gigpo_step_weight",
            self.gigpo_step_weight,
            "must be a finite number that is not negative",
        )
        for key, value in (("gamma", self.gamma), ("lam", self.lam), ("thought_logprob_scale", self.thought_logprob_scale)):
            require(0 <= value <= 1, f"algo.{key}", value, "must lie in [0, 1]")
        require(
            self.clip_ratio_c == 0 or self.clip_ratio_c > 1,
            "algo.clip_ratio_c",
            self.clip_ratio_c,
            "must be above 1, or 0 to switch it off",
        )
        require(0 <= self.clip_ratio_low <= 1, "algo.clip_ratio_low", self.clip_ratio_low, "must lie in [0, 1]")
        require(self.clip_ratio_high >= 0, "algo.clip_ratio_high", self.clip_ratio_high, "must not be negative")
        for key, value in (("sapo_tau_positive", self.sapo_tau_positive), ("sapo_tau_negative", self.sapo_tau_negative)):
            require(value > 0, f"algo.{key}", value, "must be positive")
        self._check_corrections()
        require(self.kl_coef > 0 or not self.use_kl_in_reward, "algo.use_kl_in_reward", True, "needs algo.kl_coef, the weight of that KL")

    def _check_corrections(self) -> None:
        require_choice("algo.rollout_correction_level", self.rollout_correction_level, ("sequences", "turns"))
        require(self.is_weight_cap > 0, "algo.is_weight_cap", self.is_weight_cap, "must be positive")
        remedy = "must lie in [0, 1]: at r = 1 nothing is masked"
        for key, low in (("token", self.token_mask_low), ("sequence", self.sequence_mask_low), ("geo", self.geo_mask_low)):
            require(0 <= low <= 1, f"algo.{key}_mask_low", low, remedy)
        for key, high in (("token", self.token_mask_high), ("sequence", self.sequence_mask_high), ("geo", self.geo_mask_high)):
            require(high >= 1, f"algo.{key}_mask_high", high, "must be at least 1: at r = 1 nothing is masked")
        for key, value in (("k3_mask_high", self.k3_mask_high), ("opsm_delta", self.opsm_delta)):
            require(value >= 0, f"algo.{key}", value, "must not be negative: at r = 1 nothing is masked")
