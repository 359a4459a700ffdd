"""Settings of the batch of a step: rollouts, mini-batches, micro-batches and loss aggregation."""

from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice

AGGREGATIONS = ("token_mean", "turn_mean", "sequence_mean", "fixed_length")


@dataclass(kw_only=True, slots=True)
class BatchSettings:
    """Rollouts per step, their split into mini- and micro-batches, and loss aggregation."""

    prompts_per_step: int = 32
    """Number of prompts per step, over all ranks together."""
    group_size: int = 8
    """Number of rollouts per prompt. Algorithms with group-relative advantages compare them with
    each other."""
    minibatches: int = 1
    """Number of mini-batches, that is optimizer updates, into which the groups of a step are
    split."""
    epochs: int = 1
    """Number of passes over the mini-batches of a step."""
    micro_batch_tokens: int = 8192
    """Maximum number of tokens in a packed micro-batch, for rl and sft; a longer single sequence is
    a micro-batch of its own."""
    loss_agg_mode: str = "token_mean"
    """Loss aggregation: mean over all tokens (token_mean, DAPO), over turns of their token means
    (turn_mean), over episodes of their token means (sequence_mean, GRPO), or the token sum divided
    by episodes * loss_scale_factor (fixed_length, Dr. GRPO)."""
    loss_scale_factor: int = 0
    """Number of tokens by which an episode is counted with batch.loss_agg_mode=fixed_length; must
    be 0 otherwise."""

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
