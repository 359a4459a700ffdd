"""Dataclasses for all settings of a run: the schema of the YAML files and the command line.

The entry points (`launch/`) build `Settings` once. Each component receives only the settings group
that it needs.
"""

from dataclasses import dataclass, field

from megatron_rl.config.alarms import ALARMS, AlarmSettings
from megatron_rl.config.algo import AlgoSettings
from megatron_rl.config.batch import AGGREGATIONS, BatchSettings
from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.client import ClientSettings
from megatron_rl.config.critic import CriticSettings
from megatron_rl.config.distill import DistillSettings, TeacherServerSettings
from megatron_rl.config.evaluation import EvaluationSettings
from megatron_rl.config.filter import DROPS, ENDS, FilterSettings
from megatron_rl.config.lewis import ListenerSettings, SpeakerSettings, WeightPublishSettings
from megatron_rl.config.merge import MergeSettings
from megatron_rl.config.model import PARTS, LoraSettings, ModelSettings, ParallelSettings
from megatron_rl.config.optim import OptimSettings
from megatron_rl.config.rollout import (
    ColumnSettings,
    DataSettings,
    EngineSettings,
    JudgeSettings,
    SandboxSettings,
    TaskSettings,
)
from megatron_rl.config.run import CheckpointSettings, PlanSettings, RolloutStoreSettings, RunSettings, TrackioSettings, WandbSettings
from megatron_rl.config.services import ServiceSettings, ServicesSettings, service_of
from megatron_rl.config.sft import SftSettings
from megatron_rl.config.slurm import SlurmSettings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.config.tools import McpServerSettings, ToolSettings

__all__ = [
    "AGGREGATIONS",
    "ALARMS",
    "DROPS",
    "ENDS",
    "PARTS",
    "AlarmSettings",
    "AlgoSettings",
    "BatchSettings",
    "CheckpointSettings",
    "ClientSettings",
    "ColumnSettings",
    "CriticSettings",
    "DataSettings",
    "DistillSettings",
    "EngineSettings",
    "EvaluationSettings",
    "FilterSettings",
    "JudgeSettings",
    "ListenerSettings",
    "LoraSettings",
    "McpServerSettings",
    "MergeSettings",
    "ModelSettings",
    "OptimSettings",
    "ParallelSettings",
    "PlanSettings",
    "RolloutStoreSettings",
    "RunSettings",
    "SandboxSettings",
    "ServiceSettings",
    "ServicesSettings",
    "Settings",
    "SftSettings",
    "SlurmSettings",
    "SpeakerSettings",
    "TaskSettings",
    "TeacherServerSettings",
    "ToolSettings",
    "TrackioSettings",
    "WandbSettings",
    "WeightPublishSettings",
    "require",
    "require_choice",
    "service_of",
]  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Settings:
    """All settings of a run; each field except `stage` is a settings group."""

    stage: str = "rl"
    """Training stage: rl (reinforcement learning) or sft (supervised fine-tuning, e.g. as a warm
    start before RL)."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    rollouts: RolloutStoreSettings = field(default_factory=RolloutStoreSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    trackio: TrackioSettings = field(default_factory=TrackioSettings)
    services: ServicesSettings = field(default_factory=ServicesSettings)
    weight_publish: WeightPublishSettings = field(default_factory=WeightPublishSettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)

    def __post_init__(self) -> None:
        require_choice("stage", self.stage, ("rl", "sft"))
        is_rl, dropout = self.stage == "rl", self.lora.dropout
        self.engine.return_routed_experts |= self.algo.routing_replay == "rollout"
        require(not (is_rl and dropout), "lora.dropout", dropout, "must be 0 in stage=rl: the engine samples without dropout")
        self.services.require_asked(self.task)
        if isinstance(self.task.options, GymnasiumOptions):
            history, most = self.task.options.history, self.engine.max_images
            remedy = f"must be at least task.options.history={history}, the number of images in a prompt"
            require(history <= most, "engine.max_images", most, remedy)
        mode, rollouts = self.run.mode, self.rollouts
        require(mode == "train" or is_rl, "run.mode", mode, "requires stage=rl; remove this setting")
        remedy = "requires rollouts.save=all"
        require(mode != "rollout_only" or rollouts.save == "all", "run.mode", mode, remedy)
        remedy = "requires rollouts.replay_from=RUN/rollouts of a run with rollouts.save=all"
        require(mode != "replay" or bool(rollouts.replay_from), "run.mode", mode, remedy)
        require(
            is_rl or not self.weight_publish.urls,
            "weight_publish.urls",
            self.weight_publish.urls,
            "weights are published only in stage=rl; remove the URLs",
        )
