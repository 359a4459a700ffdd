"""How the policy is updated: optimizer, GRPO and its family, the supervised warm start."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import PARTS

ENDS = ("done", "max_turns", "max_tokens", "max_images", "max_pixels", "max_seconds", "tool_error")
"""How an episode that is scored can end: the values of types.End but for the fault of ours."""
DROPS = ("zero_std", "no_image", "end")
"""Why a rollout can be left out of the update, in the order they are looked at."""


@dataclass(kw_only=True, slots=True)
class OptimizerSettings:
    lr: float = 1e-6
    part_lr: dict[str, float] = field(default_factory=dict)
    """Peak learning rates of single parts in place of lr, e.g. {vision: 1e-7}; the schedule's shape is the same."""
    schedule: str = "constant"
    """constant, linear or cosine, after the warm-up; the last two fall to min_lr at the last step."""
    warmup_steps: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def check_optimizer(self, room: str) -> None:
        """Called by the settings that are optimizers' (`algo`, `sft`), so that the key in the message is the one to change."""
        require_choice(f"{room}.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(self.lr >= 0, f"{room}.lr", self.lr, "must not be negative")
        for part, lr in self.part_lr.items():
            require_choice(f"{room}.part_lr", part, PARTS)
            require(lr >= self.min_lr, f"{room}.part_lr.{part}", lr, f"must be at least {room}.min_lr={self.min_lr}")
        require(self.warmup_steps >= 0, f"{room}.warmup_steps", self.warmup_steps, "must not be negative")
        require(0 <= self.min_lr <= self.lr, f"{room}.min_lr", self.min_lr, f"must lie between 0 and {room}.lr={self.lr}")
        require(self.clip_grad > 0, f"{room}.clip_grad", self.clip_grad, "must be positive; a large number switches clipping off")


@dataclass(kw_only=True, slots=True)
class AlgoSettings(OptimizerSettings):
    """GRPO (arXiv 2402.03300) with the corrections of DAPO (2503.14476) and Dr. GRPO (2503.20783) as switches."""

    group_size: int = 8
    prompts_per_step: int = 32
    minibatches: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 8192
    """Tokens of one packed micro-batch at most (a longer single sequence is a micro-batch of its own)."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); Dr. GRPO does not."""
    std_eps: float = 1e-6
    credit: str = "broadcast"
    """What the tokens of a turn are credited with. broadcast: the episode's advantage. turn_group: the advantage of the episode's outcome
    plus that of the turn's score among the group's turns of the same number. return_to_go: the advantage, among the same, of what the
    episode earned from this turn on."""
    turn_discount: float = 1.0
    """Of later turns' rewards in return_to_go."""
    drop: list[str] = field(default_factory=list)
    """Rollouts left out of the update, after their advantages are known: zero_std (groups of equal rewards), no_image, end (its end is not
    in keep_ends)."""
    keep_ends: list[str] = field(default_factory=lambda: ["done"])
    max_generations: int = 1
    """Rounds of prompts_per_step prompts that a step rolls out at most, until it has prompts_per_step groups left after the drops."""
    rank_by_std: bool = False
    """Of surplus groups keep those with the largest deviation of rewards; otherwise all are trained on."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """DAPO's clip-higher: a value above clip_low."""
    dual_clip: float = 0.0
    """Bound on ratio * |advantage| for negative advantages (arXiv 1912.09729), e.g. 3; 0 is off."""
    aggregation: str = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO) or fixed_length (Dr. GRPO: divide by episodes * fixed_length)."""
    fixed_length: int = 0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    temperature: float = 1.0
    """Of the policy as a distribution: sampling and training use the same one."""

    def __post_init__(self) -> None:
        self.check_optimizer("algo")
        for key in ("prompts_per_step", "minibatches", "epochs", "micro_batch_tokens"):
            require(getattr(self, key) >= 1, f"algo.{key}", getattr(self, key), "must be at least 1")
        require(self.group_size >= 2, "algo.group_size", self.group_size, "must be at least 2: a group of one has no baseline")
        remedy = f"must divide by algo.minibatches={self.minibatches}: minibatches are cut by groups"
        require(self.prompts_per_step % self.minibatches == 0, "algo.prompts_per_step", self.prompts_per_step, remedy)
        require_choice("algo.aggregation", self.aggregation, ("token_mean", "sequence_mean", "fixed_length"))
        is_fixed, remedy = self.aggregation == "fixed_length", "goes with algo.aggregation=fixed_length, and only with it"
        require(is_fixed == (self.fixed_length > 0), "algo.fixed_length", self.fixed_length, remedy)
        for key in ("std_eps", "kl_coef"):
            require(getattr(self, key) >= 0, f"algo.{key}", getattr(self, key), "must not be negative")
        require_choice("algo.kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        require(self.temperature > 0, "algo.temperature", self.temperature, "must be positive: greedy sampling has no gradient")
        require_choice("algo.credit", self.credit, ("broadcast", "turn_group", "return_to_go"))
        require(0 <= self.turn_discount <= 1, "algo.turn_discount", self.turn_discount, "must lie in [0, 1]")
        for name in self.drop:
            require_choice("algo.drop", name, DROPS)
        for end in self.keep_ends:
            require_choice("algo.keep_ends", end, ENDS)
        require(self.max_generations >= 1, "algo.max_generations", self.max_generations, "must be at least 1")
        require(self.dual_clip == 0 or self.dual_clip > 1, "algo.dual_clip", self.dual_clip, "must be above 1, or 0 to switch it off")
        require(0 <= self.clip_low < 1, "algo.clip_low", self.clip_low, "must lie in [0, 1)")
        require(self.clip_high >= 0, "algo.clip_high", self.clip_high, "must not be negative")


@dataclass(kw_only=True, slots=True)
class SftSettings(OptimizerSettings):
    """The supervised warm start: stages one after the other, each with its own demonstrations."""

    batch_size: int = 64
    num_demonstrations: int = 1200
    """Drawn once a stage; batches go round them in order."""
    micro_batch_tokens: int = 8192
    splits: list[str] = field(default_factory=lambda: ["correct", "biased"])
    """The task's demonstration splits, in order..."""
    steps: list[int] = field(default_factory=lambda: [250, 60])
    """...and the optimizer steps of each."""

    def __post_init__(self) -> None:
        self.check_optimizer("sft")
        for key in ("batch_size", "num_demonstrations", "micro_batch_tokens"):
            require(getattr(self, key) >= 1, f"sft.{key}", getattr(self, key), "must be at least 1")
        require(len(self.splits) == len(self.steps), "sft.steps", self.steps, f"needs one number for each of sft.splits={self.splits}")
        require(bool(self.steps) and min(self.steps) >= 1, "sft.steps", self.steps, "needs at least one stage, of at least one step each")
