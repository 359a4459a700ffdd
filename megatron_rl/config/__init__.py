"""The settings of a run. These dataclasses are the schema: yaml and the command line only pick values.

`Settings` is built once at the door (launch/) and passed inward as plain dataclasses; rooms receive the part they need.
"""

from dataclasses import dataclass, field

from megatron_rl.config.algo import DROPS, ENDS, AlgoSettings, OptimizerSettings, SftSettings
from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import PARTS, LoraSettings, ModelSettings, ParallelSettings
from megatron_rl.config.rollout import DataSettings, EngineSettings, JudgeSettings, SandboxSettings, TaskSettings
from megatron_rl.config.run import CheckpointSettings, RunSettings, WandbSettings

__all__ = [
    "DROPS", "ENDS", "PARTS", "AlgoSettings", "CheckpointSettings", "DataSettings", "EngineSettings", "JudgeSettings", "LoraSettings",
    "ModelSettings", "OptimizerSettings", "ParallelSettings", "RunSettings", "SandboxSettings", "Settings", "SftSettings", "TaskSettings",
    "WandbSettings", "require", "require_choice",
]  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Settings:
    stage: str = "grpo"
    """grpo, or sft for the supervised warm start."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    run: RunSettings = field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)

    def __post_init__(self) -> None:
        require_choice("stage", self.stage, ("grpo", "sft"))
