"""Settings of the RL algorithm.

The valid algorithm names are the keys of `ALGORITHMS` in algo/algorithms.py. Presets are in
configs/algo.
"""

import math
from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice


@dataclass(kw_only=True, slots=True)
class AlgoSettings:
    """Settings of advantages, policy loss, KL term and rollout correction."""

    name: str = "grpo"
    """Name of the algorithm, a key of ALGORITHMS in algo/algorithms.py. The algorithm determines
    the advantage function and the policy loss."""
    norm_adv_by_std: bool = True
    """Divide advantages by the standard deviation within their group (GRPO); false omits this
    division, as in the preset dr_grpo."""
    std_eps: float = 1e-6
    """Constant added to the group's standard deviation before advantages are divided by it."""
    turn_credit: str = "broadcast"
    """Advantage of a turn (algo/advantages.py). broadcast: the episode's advantage.
    outcome_and_turn: the advantage of the outcome reward plus the advantage of the turn's step
    score. return_to_go: the turn's return-to-go relative to the returns-to-go of other rollouts.
    gigpo: the episode's advantage plus a weighted same-state advantage, which compares the turn
    with turns that started in the same state."""
    gamma: float = 1.0
    """Discount factor gamma. With turn_credit=return_to_go or gigpo, rewards are discounted once
    per turn; with a critic, rewards are discounted once per turn or once per token
    (algo.gae_level)."""
    gigpo_step_weight: float = 1.0
    """Weight of GiGPO's same-state advantage, which turn_credit=gigpo adds to the episode's
    advantage."""
    gae_level: str = "tokens"
    """Time step of generalized advantage estimation: tokens (one time step per sampled token) or
    turns (one time step per turn, with the value of the state before the turn)."""
    lam: float = 1.0
    """Lambda of generalized advantage estimation (arXiv 1506.02438): 0 uses the one-step TD error;
    1 uses the full return minus the value."""
    bootstrap_truncated: bool = False
    """If the environment truncated an episode (stop reason env_truncated), use the critic's value
    of the state after the last observation as the value after the end; false uses 0. Requires an
    algorithm with a critic."""
    whiten_advantages: bool = True
    """With a critic, whiten advantages to mean 0 and standard deviation 1 over all GAE time steps
    of the step's training rollouts."""
    clip_ratio_low: float = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_ratio_low. gmpo applies this limit to the
    log ratio instead, and dppo applies it to the decrease in probability."""
    clip_ratio_high: float = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_ratio_high. A value above clip_ratio_low
    is DAPO's clip-higher. gmpo applies this limit to the log ratio instead, and dppo applies it to
    the increase in probability."""
    clip_ratio_c: float = 0.0
    """Dual-clip bound on ratio * |advantage| for negative advantages (arXiv 1912.09729), e.g. 3; 0
    disables it."""
    sapo_tau_positive: float = 1.0
    """Temperature tau of SAPO's sigmoid gate for positive advantages; a larger value makes the gate
    steeper."""
    sapo_tau_negative: float = 1.05
    """Temperature tau of SAPO's sigmoid gate for negative advantages; a larger value makes the gate
    steeper."""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence from the reference model, in the loss or in the reward; 0
    disables it."""
    kl_estimator: str = "k3"
    """Estimator of the KL term in the loss (algo/kl.py): k1, k2 or k3."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * (old logprob - reference logprob) from each token's reward instead of
    adding a KL term to the loss."""
    kl_target: float = 0.0
    """Target KL divergence per token (the metric policy/kl_ref), e.g. 0.02: after every step,
    kl_coef is adapted towards it. 0 keeps kl_coef fixed."""
    kl_horizon: int = 10_000
    """Number of episodes over which kl_coef changes by 20% if the KL divergence deviates from
    kl_target by 20% or more; a smaller deviation changes kl_coef proportionally less."""
    thought_logprob_scale: float = 1.0
    """Factor by which the policy loss multiplies the logprobs of a turn's thought (its tokens
    before the action); RL4VLM uses 0.5 and 0.2. With a value other than 1, the ratio no longer
    equals the probability ratio of the sampled text (docs/algorithm.md)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    rollout_correction: str = "none"
    """Corrections of the mismatch between rollout and trainer logprobs, joined by +, e.g.
    bypass+geo_mask. The corrections are the keys of CORRECTIONS in algo/rollout_correction.py. Most
    corrections use r, a token's trainer probability divided by its rollout probability."""
    rollout_correction_level: str = "sequences"
    """Unit over which a rollout correction aggregates token ratios: sequences (each token sequence)
    or turns (each turn of a token sequence)."""
    is_weight_cap: float = 2.0
    """Upper bound on the importance-sampling weight in the corrections token_tis and
    sequence_tis."""
    token_mask_low: float = 0.5
    """Lower bound on a token's trainer/rollout probability ratio: token_mask masks tokens below
    it."""
    token_mask_high: float = 5.0
    """Upper bound on a token's trainer/rollout probability ratio: token_mask masks tokens above
    it."""
    sequence_mask_low: float = 0.0
    """Lower bound on the product of a sequence's trainer/rollout probability ratios: sequence_mask
    masks sequences below it."""
    sequence_mask_high: float = 3.0
    """Upper bound on the product of a sequence's trainer/rollout probability ratios: sequence_mask
    masks sequences above it."""
    geo_mask_low: float = 0.99
    """Lower bound on the geometric mean of a sequence's trainer/rollout probability ratios:
    geo_mask masks sequences below it."""
    geo_mask_high: float = 1.01
    """Upper bound on the geometric mean of a sequence's trainer/rollout probability ratios:
    geo_mask masks sequences above it."""
    k3_mask_high: float = 0.01
    """Upper bound on a sequence's mean of r - 1 - log r: k3_mask masks sequences above it. The
    letter r denotes a token's trainer/rollout probability ratio."""
    opsm_delta: float = 0.5
    """Upper bound on a sequence's mean of (rollout logprob - current logprob). If a sequence
    exceeds the bound, opsm masks every token of the sequence that has a negative advantage."""
    routing_replay: str = "none"
    """Experts with which the policy computes each token of a model with experts (docs/experts.md).
    none: its own choice in every pass. policy: its choice in the pass that computes the old
    logprobs (R2). rollout: the choice of the rollout engine (R3)."""
    router_aux_loss_coef: float = 0.0
    """Coefficient of the load-balancing loss of the routers of a model with experts
    (docs/algorithm.md); 0 disables it. It needs one more forward pass per update."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the z loss of the routers of a model with experts (docs/algorithm.md); 0
    disables it."""
    temperature: float = 1.0
    """Softmax temperature of the policy, used both for sampling and for the trainer's logprobs."""

    def __post_init__(self) -> None:
        for key in ("std_eps", "kl_coef", "entropy_coef", "router_aux_loss_coef", "router_z_loss_coef"):
            value = getattr(self, key)
            require(0 <= value < math.inf, f"algo.{key}", value, "must be a finite, non-negative number")
        require(0 <= self.kl_target < math.inf, "algo.kl_target", self.kl_target, "must be a finite, non-negative number")
        require(
            self.kl_target == 0 or self.kl_coef > 0,
            "algo.kl_target",
            self.kl_target,
            "requires a positive algo.kl_coef as the initial coefficient",
        )
        require(self.kl_horizon >= 1, "algo.kl_horizon", self.kl_horizon, "must be at least 1")
        remedy = "must be in [0.01, 2]: vLLM changes or rejects other values"
        require(0.01 <= self.temperature <= 2, "algo.temperature", self.temperature, remedy)
        require_choice("algo.gae_level", self.gae_level, ("tokens", "turns"))
        require(
            0 <= self.gigpo_step_weight < math.inf,
            "algo.gigpo_step_weight",
            self.gigpo_step_weight,
            "must be a finite, non-negative number",
        )
        for key, value in (("gamma", self.gamma), ("lam", self.lam), ("thought_logprob_scale", self.thought_logprob_scale)):
            require(0 <= value <= 1, f"algo.{key}", value, "must be in [0, 1]")
        require(
            self.clip_ratio_c == 0 or self.clip_ratio_c > 1,
            "algo.clip_ratio_c",
            self.clip_ratio_c,
            "must be above 1, or 0 to disable dual clipping",
        )
        require(0 <= self.clip_ratio_low <= 1, "algo.clip_ratio_low", self.clip_ratio_low, "must be in [0, 1]")
        require(self.clip_ratio_high >= 0, "algo.clip_ratio_high", self.clip_ratio_high, "must not be negative")
        for key, value in (("sapo_tau_positive", self.sapo_tau_positive), ("sapo_tau_negative", self.sapo_tau_negative)):
            require(value > 0, f"algo.{key}", value, "must be positive")
        self._check_corrections()
        require_choice("algo.routing_replay", self.routing_replay, ("none", "policy", "rollout"))
        require(self.kl_coef > 0 or not self.use_kl_in_reward, "algo.use_kl_in_reward", True, "requires a positive algo.kl_coef")

    def _check_corrections(self) -> None:
        require_choice("algo.rollout_correction_level", self.rollout_correction_level, ("sequences", "turns"))
        require(self.is_weight_cap > 0, "algo.is_weight_cap", self.is_weight_cap, "must be positive")
        remedy = "must be in [0, 1], so that r = 1 is never masked"
        for key, low in (("token", self.token_mask_low), ("sequence", self.sequence_mask_low), ("geo", self.geo_mask_low)):
            require(0 <= low <= 1, f"algo.{key}_mask_low", low, remedy)
        for key, high in (("token", self.token_mask_high), ("sequence", self.sequence_mask_high), ("geo", self.geo_mask_high)):
            require(high >= 1, f"algo.{key}_mask_high", high, "must be at least 1, so that r = 1 is never masked")
        for key, value in (("k3_mask_high", self.k3_mask_high), ("opsm_delta", self.opsm_delta)):
            require(value >= 0, f"algo.{key}", value, "must not be negative, so that r = 1 is never masked")
