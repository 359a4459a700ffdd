"""Settings of supervised fine-tuning: consecutive stages with different demonstrations."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require


@dataclass(kw_only=True, slots=True)
class SftSettings:
    """Demonstrations, batch size and steps of supervised fine-tuning."""

    batch_size: int = 64
    """Number of demonstrations per optimizer step."""
    num_demonstrations: int = 1200
    """Number of demonstrations drawn at the start of each stage; batches cycle through these
    demonstrations in order."""
    splits: list[str] = field(default_factory=lambda: ["correct", "biased"])
    """Demonstration splits of the task, one per stage, in order; the split named transcripts
    contains the files in task.data.demonstrations."""
    steps: list[int] = field(default_factory=lambda: [250, 60])
    """Number of optimizer steps in each stage."""

    def __post_init__(self) -> None:
        for key, value in (("batch_size", self.batch_size), ("num_demonstrations", self.num_demonstrations)):
            require(value >= 1, f"sft.{key}", value, "must be at least 1")
        require(
            len(self.splits) == len(self.steps),
            "sft.steps",
            self.steps,
            f"must contain one number for each split in sft.splits={self.splits}",
        )
        require(
            bool(self.steps) and min(self.steps) >= 1,
            "sft.steps",
            self.steps,
            "must contain at least one stage, and each stage at least one step",
        )
