"""What a run does with its parts: reinforcement learning, the warm start, or training once more on steps that were recorded."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.algo.algorithms import Algorithm
from megatron_rl.build import NoOffload, PolicyAndCritic, build_rollout_manager, episode_settings, generation_settings
from megatron_rl.config import Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import World
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.preflight.prompts import report_column_warnings, report_prompts
from megatron_rl.rollout.health import ServerSupervisor
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.replay import Replay
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.weight_publisher import WeightPublisher
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.record import Run
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.sft import train_sft
from megatron_rl.training_loop import train


@dataclass(slots=True, kw_only=True)
class TrainerContext:
    """What a stage works with on every rank."""

    world: World
    task: Task
    algorithms: Mapping[str, Algorithm]
    renderer: Renderer
    policy: Policy
    critic: Critic | None
    """Of algorithms that need values, where its trunk is its own."""
    run: Run
    checkpoints: Checkpoints
    stop: StopSignal
    gallery: ImageExchange
    closing: ExitStack
    """Closes what was opened, in reverse, however the run ends."""
    household: ServerSupervisor | None = None
    """Of engines that the run has started itself; the main rank's."""
    fleet: RolloutManager | None = None
    """The engines, from open_fleet on."""

    def build_rollout_manager(self, settings: Settings) -> RolloutManager:
        """The engines and what their episodes share. vLLM takes its part of a GPU at once, and must find it free."""
        with self.run.spans("start"):
            own = PolicyAndCritic(self.policy, self.critic) if self.critic else self.policy
            trainer = NoOffload() if settings.engine.mode == "server" else own
            trainer.sleep()
            fleet = self.fleet = build_rollout_manager(
                settings, self.task,
                trainer=trainer, renderer=self.renderer, world=self.world, gallery=self.gallery, stop=self.stop, tell=self.run.log,
                household=self.household, timed=self.run.trace.episode,
            )  # fmt: skip
            self.closing.push(lambda failure, *_: fleet.close(in_step=failure is None))
            fleet.start()
        return fleet

    def save_progress(self) -> None:
        """Have a checkpoint of the steps that are done, for the run's next life."""
        run = self.run
        with run.spans("checkpoint"), self.fleet.offloaded() if self.fleet else nullcontext():
            self.checkpoints.save(run.num_done, history=run.history, metrics=run.metrics)


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainingStage:
    """What a run is for: how long, on which examples, and what it does with its parts."""

    num_steps: Callable[[Settings], int]
    splits: tuple[str, ...]
    """Splits of the task that must have examples."""
    is_rl: bool
    """It trains the distribution that it samples from, at algo.temperature and beside a reference."""
    run: Callable[[Settings, TrainerContext], RolloutManager | None]
    """Trains, and leaves engines that serve what was trained, where there are any."""


def run_rl(settings: Settings, parts: TrainerContext) -> RolloutManager:
    fleet = parts.build_rollout_manager(settings)
    with parts.run.spans("start"):
        report_prompts(settings, fleet=fleet, tell=parts.run.log)
    audience = WeightPublisher(settings.weight_publish, run=settings.run.dir, is_main=parts.world.is_main, tell=parts.run.log)
    _run_training_loop(settings, parts, fleet, audience)
    return fleet


def run_replay(settings: Settings, parts: TrainerContext) -> None:
    fleet = Replay(
        Path(settings.run.replay), world=parts.world, gather=parts.gallery.gather_rollouts,
        rounds=generation_settings(settings), episode=episode_settings(settings),
    )  # fmt: skip
    _run_training_loop(settings, parts, fleet, None)


def _run_training_loop(settings: Settings, parts: TrainerContext, fleet: RolloutManager | Replay, audience: WeightPublisher | None) -> None:
    with parts.checkpoints.wait_for_save_on_failure(parts.run):
        train(
            settings, policy=parts.policy, critic=parts.critic, fleet=fleet, gallery=parts.gallery, run=parts.run,
            checkpoints=parts.checkpoints, stop=parts.stop, algorithms=parts.algorithms, audience=audience,
        )  # fmt: skip


def run_sft(settings: Settings, parts: TrainerContext) -> RolloutManager:
    policy, run = parts.policy, parts.run
    own = {"task": parts.task, "renderer": parts.renderer, "checkpoints": parts.checkpoints, "stop": parts.stop}
    report_column_warnings({"eval": parts.task.examples("eval")}, tell=run.log)
    train_sft(settings, policy=policy, run=run, **own)
    fleet = parts.build_rollout_manager(settings)
    with run.spans("sync"):
        fleet.update_weights(policy.hf_weights(), version=0)
    return fleet


STAGES: Mapping[str, TrainingStage] = {
    "rl": TrainingStage(num_steps=lambda s: s.run.steps, splits=("train", "eval"), is_rl=True, run=run_rl),
    "sft": TrainingStage(num_steps=lambda s: sum(s.sft.steps), splits=("eval",), is_rl=False, run=run_sft),
}
REPLAY = TrainingStage(num_steps=lambda s: s.run.steps, splits=(), is_rl=True, run=run_replay)
"""stage=rl with run.replay."""
