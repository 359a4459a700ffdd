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
    splits: list[str] = field(default_factory=list)
    """Demonstration splits of the task, one per stage, in order. The split transcripts contains the
    files in task.data.demonstrations; the split answers of task vqa contains the questions in
    task.data.train with their reference answers. Empty uses the task's only split."""
    steps: list[int] = field(default_factory=lambda: [100])
    """Number of optimizer steps in each stage."""

    def __post_init__(self) -> None:
        for key, value in (("batch_size", self.batch_size), ("num_demonstrations", self.num_demonstrations)):
            require(value >= 1, f"sft.{key}", value, "must be at least 1")
        remedy = f"must contain one number for each split in sft.splits={self.splits}"
        require(len(self.splits or [""]) == len(self.steps), "sft.steps", self.steps, remedy)
        require(
            bool(self.steps) and min(self.steps) >= 1,
            "sft.steps",
            self.steps,
            "must contain at least one stage, and each stage at least one step",
        )
