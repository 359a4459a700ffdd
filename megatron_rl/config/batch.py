"""How much is rolled out in a step, how its rollouts become optimizer updates, and how their losses are averaged."""

from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice

AGGREGATIONS = ("token_mean", "turn_mean", "sequence_mean", "fixed_length")


@dataclass(kw_only=True, slots=True)
class BatchSettings:
    """Sizes of a step, of its updates and of its micro-batches, and the mean over them."""

    prompts_per_step: int = 32
    """Prompts that a step rolls out, over all processes together."""
    group_size: int = 8
    """Episodes of each prompt; they are compared with each other, where the algorithm compares."""
    minibatches: int = 1
    """Optimizer updates that a step's groups are cut into."""
    epochs: int = 1
    """Times that a step's minibatches are gone through."""
    micro_batch_tokens: int = 8192
    """Tokens of one packed micro-batch at most (a longer single context is a micro-batch of its own); the warm start's too."""
    loss_agg_mode: str = "token_mean"
    """Mean over all tokens (token_mean, DAPO), over turns of their token means (turn_mean), over episodes of their token means
    (sequence_mean, GRPO), or the sum over tokens divided by episodes * fixed_length (fixed_length, Dr. GRPO)."""
    loss_scale_factor: int = 0
    """Tokens that an episode counts as where batch.loss_agg_mode=fixed_length; 0 otherwise."""

    def __post_init__(self) -> None:
        for key, value in (("prompts_per_step", self.prompts_per_step), ("minibatches", self.minibatches), ("epochs", self.epochs)):
            require(value >= 1, f"batch.{key}", value, "must be at least 1")
        require(self.micro_batch_tokens >= 1, "batch.micro_batch_tokens", self.micro_batch_tokens, "must be at least 1")
        require(self.group_size >= 1, "batch.group_size", self.group_size, "must be at least 1")
        remedy = f"must be divisible by batch.minibatches={self.minibatches}: minibatches are cut by groups"
        require(self.prompts_per_step % self.minibatches == 0, "batch.prompts_per_step", self.prompts_per_step, remedy)
        require_choice("batch.loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        is_fixed, remedy = self.loss_agg_mode == "fixed_length", "goes with batch.loss_agg_mode=fixed_length, and only with it"
        require(is_fixed == (self.loss_scale_factor > 0), "batch.loss_scale_factor", self.loss_scale_factor, remedy)
