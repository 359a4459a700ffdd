"""Settings of a step's batch: rollouts, mini-batches, micro-batches and loss aggregation."""

from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice

AGGREGATIONS = ("token_mean", "turn_mean", "sequence_mean", "fixed_length")


@dataclass(kw_only=True, slots=True)
class BatchSettings:
    """Rollouts per step, their split into mini- and micro-batches, and loss aggregation."""

    prompts_per_step: int = 32
    """Total number of prompts per step over all ranks."""
    group_size: int = 8
    """Number of rollouts sampled per prompt. The rollouts of a prompt form a group; group-relative
    algorithms compare rewards within a group."""
    minibatches: int = 1
    """Number of mini-batches into which the groups of a step are split; each mini-batch is one
    optimizer update."""
    epochs: int = 1
    """Number of passes over the mini-batches of a step (PPO epochs); run.epochs is the number of
    passes over the training examples."""
    micro_batch_tokens: int = 8192
    """Maximum number of tokens in a packed micro-batch, in stages rl and sft; a longer sequence
    gets its own micro-batch."""
    loss_agg_mode: str = "token_mean"
    """Loss aggregation: token_mean (mean over all tokens, DAPO), turn_mean (mean per turn, then
    over turns), sequence_mean (mean per episode, then over episodes, GRPO), or fixed_length (sum
    over tokens, divided by the number of episodes * loss_scale_factor, as in the preset
    dr_grpo)."""
    loss_scale_factor: int = 0
    """Constant episode length in tokens by which batch.loss_agg_mode=fixed_length divides the loss;
    must be 0 in all other modes."""

    def __post_init__(self) -> None:
        for key, value in (("prompts_per_step", self.prompts_per_step), ("minibatches", self.minibatches), ("epochs", self.epochs)):
            require(value >= 1, f"batch.{key}", value, "must be at least 1")
        require(self.micro_batch_tokens >= 1, "batch.micro_batch_tokens", self.micro_batch_tokens, "must be at least 1")
        require(self.group_size >= 1, "batch.group_size", self.group_size, "must be at least 1")
        remedy = f"must be divisible by batch.minibatches={self.minibatches}: minibatches consist of whole groups"
        require(self.prompts_per_step % self.minibatches == 0, "batch.prompts_per_step", self.prompts_per_step, remedy)
        require_choice("batch.loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        is_fixed, remedy = self.loss_agg_mode == "fixed_length", "must be positive with batch.loss_agg_mode=fixed_length, and 0 otherwise"
        require(is_fixed == (self.loss_scale_factor > 0), "batch.loss_scale_factor", self.loss_scale_factor, remedy)
