"""What a run does with its parts: reinforcement learning, the warm start, or training once more on steps that were recorded."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.algo.algorithms import Algorithm
from megatron_rl.build import Staying, Trained, build_fleet, episode_settings, round_settings
from megatron_rl.config import Settings
from megatron_rl.distributed.image_exchange import Gallery
from megatron_rl.distributed.world import World
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.preflight.prompts import tell_column_warnings, tell_prompts
from megatron_rl.rollout.health import Household
from megatron_rl.rollout.manager import Fleet
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.replay import Replay
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.weight_publisher import Audience
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.record import Run
from megatron_rl.run.shutdown import Stop
from megatron_rl.sft import warm_start
from megatron_rl.training_loop import train


@dataclass(slots=True, kw_only=True)
class Parts:
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
    stop: Stop
    gallery: Gallery
    closing: ExitStack
    """Closes what was opened, in reverse, however the run ends."""
    household: Household | None = None
    """Of engines that the run has started itself; the main rank's."""
    fleet: Fleet | None = None
    """The engines, from open_fleet on."""

    def open_fleet(self, settings: Settings) -> Fleet:
        """The engines and what their episodes share. vLLM takes its part of a GPU at once, and must find it free."""
        with self.run.spans("start"):
            own = Trained(self.policy, self.critic) if self.critic else self.policy
            trainer = Staying() if settings.engine.kind == "remote" else own
            trainer.sleep()
            fleet = self.fleet = build_fleet(
                settings, self.task,
                trainer=trainer, renderer=self.renderer, world=self.world, gallery=self.gallery, stop=self.stop, tell=self.run.tell,
                household=self.household, timed=self.run.trace.episode,
            )  # fmt: skip
            self.closing.push(lambda failure, *_: fleet.close(in_step=failure is None))
            fleet.start()
        return fleet

    def save_what_is_done(self) -> None:
        """Have a checkpoint of the steps that are done, for the run's next life."""
        run = self.run
        with run.spans("checkpoint"), self.fleet.away() if self.fleet else nullcontext():
            self.checkpoints.save(run.num_done, history=run.history, metrics=run.metrics)


@dataclass(slots=True, frozen=True, kw_only=True)
class Stage:
    """What a run is for: how long, on which examples, and what it does with its parts."""

    num_steps: Callable[[Settings], int]
    splits: tuple[str, ...]
    """Splits of the task that must have examples."""
    is_rl: bool
    """It trains the distribution that it samples from, at algo.temperature and beside a reference."""
    play: Callable[[Settings, Parts], Fleet | None]
    """Trains, and leaves engines that serve what was trained, where there are any."""


def reinforce(settings: Settings, parts: Parts) -> Fleet:
    fleet = parts.open_fleet(settings)
    with parts.run.spans("start"):
        tell_prompts(settings, fleet=fleet, tell=parts.run.tell)
    audience = Audience(settings.audience, run=settings.run.dir, is_main=parts.world.is_main, tell=parts.run.tell)
    _train(settings, parts, fleet, audience)
    return fleet


def replay(settings: Settings, parts: Parts) -> None:
    fleet = Replay(
        Path(settings.run.replay), world=parts.world, gather=parts.gallery.gather,
        rounds=round_settings(settings), episode=episode_settings(settings),
    )  # fmt: skip
    _train(settings, parts, fleet, None)


def _train(settings: Settings, parts: Parts, fleet: Fleet | Replay, audience: Audience | None) -> None:
    with parts.checkpoints.settled_on_failure(parts.run):
        train(
            settings, policy=parts.policy, critic=parts.critic, fleet=fleet, gallery=parts.gallery, run=parts.run,
            checkpoints=parts.checkpoints, stop=parts.stop, algorithms=parts.algorithms, audience=audience,
        )  # fmt: skip


def supervise(settings: Settings, parts: Parts) -> Fleet:
    policy, run = parts.policy, parts.run
    own = {"task": parts.task, "renderer": parts.renderer, "checkpoints": parts.checkpoints, "stop": parts.stop}
    tell_column_warnings({"eval": parts.task.examples("eval")}, tell=run.tell)
    warm_start(settings, policy=policy, run=run, **own)
    fleet = parts.open_fleet(settings)
    with run.spans("sync"):
        fleet.serve(policy.hf_weights(), version=0)
    return fleet


STAGES: Mapping[str, Stage] = {
    "rl": Stage(num_steps=lambda s: s.run.steps, splits=("train", "eval"), is_rl=True, play=reinforce),
    "sft": Stage(num_steps=lambda s: sum(s.sft.steps), splits=("eval",), is_rl=False, play=supervise),
}
REPLAY = Stage(num_steps=lambda s: s.run.steps, splits=(), is_rl=True, play=replay)
"""stage=rl with run.replay."""
