"""The training loop with real records and checkpoints, around a scripted rollout manager and
scripted networks. Tests when AdamW is restarted, and the KL coefficient of each step, also across
attempts.
"""

import gc
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl import training_batch, training_loop
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.config import AlgoSettings, BatchSettings, CriticSettings, ModelSettings, RunSettings, Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.errors import GracefulStop
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.checkpoint_state import InputDigests
from megatron_rl.run.checkpoints import Checkpoints, find_checkpoint
from megatron_rl.run.record import Run
from megatron_rl.types import MicroBatch, Rollout, TokenSequence
from tests.run.test_checkpoints import SlowPolicy
from tests.support.comparable_metrics import drop_timings
from tests.support.random_loss_inputs import make_loss_inputs
from tests.test_training_loop import Scripted, by_token, step

NO_UPDATE = 2
"""The step whose rollouts are all dropped."""
KLS = [0.3, 0.0, None, 0.11, 0.0, 0.1]
"""KL measured by each step's update."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    dist.destroy_process_group()


class Played:
    """A rollout manager that returns the same rollouts in every step."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(num_generation_batches=0, pending_prompt_indices=[], unfinished_prompt_indices=[])

    def busy_s(self) -> float:
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {"weight_sync/pause_s": 0.25}

    def offloaded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None: ...

    def generate(self, number: int, *, is_enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        rollouts = step()
        is_enough(rollouts)
        self.scheduler.num_generation_batches += 1
        for rollout in rollouts:
            rollout.filter_reason = "stop_reason" if number == NO_UPDATE and rollout.is_scored else rollout.filter_reason
        return rollouts


@dataclass(slots=True)
class Learner(Scripted, SlowPolicy):
    """Records the calls that it receives; its KL values are KLS."""

    saves: list = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """KL coefficient in the loss of each update."""
    trained: list[dict[int, float]] = field(default_factory=list)
    """Advantages of each update, by token."""

    def update(
        self,
        batches: list[MicroBatch],
        loss: Callable,
        *,
        step: int,
        value_head_only: bool = False,
        record: object = None,
        check: object = None,
    ) -> dict[str, float]:
        self.told.append(f"update {step}")
        self.seen_packed.clear()
        self.trained.append({token: value for batch in batches for token, value in by_token(batch, batch.advantage_T).items()})
        if loss.__qualname__.startswith("make_policy_objective"):
            one_off = make_loss_inputs([0.0], [0.0], old=[-1.0], ref_logprob=[-2.0])  # k1 is 1, and the loss has no other term
            self.weights.append(loss(one_off)[0].item())
        return {"policy/ratio": 1.0, "rollout_mismatch/logprob_abs_diff_max": 0.0, "policy/kl_ref": KLS[step], "value/loss": 1.0}

    def restart_optimizer(self) -> None:
        self.told.append("restart")

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def load(self, folder: Path, *, seed: int) -> None:
        self.told.append(f"load {folder.name}")


class Watching(Played):
    """Counts the objects of earlier steps that exist when the next step starts to roll out."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Counter[str]] = []

    def generate(self, number: int, *, is_enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        gc.collect()
        self.left.append(
            Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, Rollout | TokenSequence | MicroBatch))
        )
        return super().generate(number, is_enough=is_enough)


def live(
    settings: Settings, *, critic: Learner | None = None, stopped_after: int | None = None, fleet: Played | None = None,
    evaluation: dict[str, float] | None = None,
) -> Learner:  # fmt: skip
    """Run one attempt, resuming from the last one. With an evaluation, the run is finished as the
    entry point does it.
    """
    policy = Learner()
    checkpoint, state = find_checkpoint(settings)
    run = Run(settings, read_world(), num_steps=settings.run.steps, first_step=state.step, history=state.history)
    checkpoints = Checkpoints(settings, policy, resume_from=checkpoint, inputs=InputDigests())

    def check() -> None:
        if run.num_done == stopped_after:
            raise GracefulStop

    try:
        stop = SimpleNamespace(check=check)
        training_loop.train(
            run,
            policy=policy,
            critic=critic,
            rollout_manager=fleet or Played(),
            image_exchange=ImageExchange(patch_size=14),
            checkpoints=checkpoints,
            stop_signal=stop,
        )
        if evaluation is not None:
            checkpoints.finish_step(run.num_steps, history=run.history, metrics=evaluation)
            checkpoints.wait_for_save()
            run.final_folder.mkdir(exist_ok=True)
            (run.final_folder / "config.json").write_text(str(run.num_steps))
            (run.final_folder / "model.safetensors").touch()
            run.finish(evaluation)
    except GracefulStop:
        checkpoints.save(run.num_done, history=run.history, metrics=run.metrics)
    finally:
        run.close()
    return policy


def settings_of(folder: Path, model: Path, algo: AlgoSettings, **critic: object) -> Settings:
    return Settings(
        model=ModelSettings(path=str(model)), algo=algo, critic=CriticSettings(**critic),
        batch=BatchSettings(prompts_per_step=4, micro_batch_tokens=24), run=RunSettings(dir=str(folder), steps=6, max_failed_fraction=0.5),
    )  # fmt: skip


@pytest.mark.parametrize(("trunk", "warmup", "restarts"), [("shared", 2, 1), ("shared", 0, 0), ("own", 2, 0)])
def test_adamw_starts_anew_when_a_shared_trunk_begins_to_learn(
    trunk: str, warmup: int, restarts: int, random_model: Path, tmp_path: Path
) -> None:
    """AdamW is restarted once: after the last step of value head warmup with a shared backbone, and
    before the first step that trains both. With its own backbone, the critic keeps its optimizer
    state.
    """
    critic = Learner() if trunk == "own" else None
    policy = live(settings_of(tmp_path, random_model, AlgoSettings(name="ppo"), backbone=trunk, warmup_steps=warmup), critic=critic)
    steps = [f"update {number}" for number in range(6) if number != NO_UPDATE]
    if trunk == "own":
        assert critic.told == steps and policy.told == steps[warmup:]
    else:
        assert policy.told == [*steps[:warmup], *["restart"] * restarts, *steps[warmup:]]


@pytest.mark.parametrize("record", ["best", "all"])
def test_nothing_of_a_step_is_left_when_the_next_one_rolls_out(record: str, random_model: Path, tmp_path: Path) -> None:
    """When the next step starts to roll out, no rollout, sequence or micro-batch of the previous
    step remains. A node has memory for the images of one step only, not two.
    """
    settings, fleet = settings_of(tmp_path, random_model, AlgoSettings(name="rloo")), Watching()
    live(replace(settings, rollouts=replace(settings.rollouts, save=record)), fleet=fleet)
    first, *others = fleet.left
    assert others == [first] * 5


def expected_weights() -> list[float]:
    """Return the KL coefficients, computed by hand. KLs of 0.3, 0, none, 0.11 and 0 with a target
    of 0.1 change the coefficient by a quarter of each relative error, which is clipped to 0.2,
    because a step has 8 episodes and the horizon is 32.
    """
    return list(accumulate([1.05, 0.95, 1.0, 1.025, 0.95], operator.mul, initial=0.5))


def adapting(folder: Path, model: Path, *, in_reward: bool) -> Settings:
    kl = {"kl_coef": 0.5, "kl_estimator": "k1", "use_kl_in_reward": in_reward, "kl_target": 0.1, "kl_horizon": 32}
    return settings_of(folder, model, AlgoSettings(name="rloo", **kl))


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [drop_timings(line) for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("in_reward", [False, True])
def test_the_weight_of_the_kl_follows_its_target(in_reward: bool, random_model: Path, tmp_path: Path) -> None:
    """The KL coefficient of a step's metrics is the one used in that step's loss or advantages."""
    settings = adapting(tmp_path, random_model, in_reward=in_reward)
    policy = live(settings)
    found = [line["policy/kl_coef"] for line in lines_of(tmp_path)]
    assert found == pytest.approx(expected_weights(), rel=1e-12)
    used = [weight for number, weight in enumerate(found) if number != NO_UPDATE]
    assert policy.weights == ([0.0] * 5 if in_reward else used)
    for weight, trained in zip(used, policy.trained, strict=True):
        assert trained == credited_with(weight, settings)


def credited_with(weight: float, settings: Settings) -> dict[int, float]:
    rollouts = step()
    fixed = replace(settings, algo=replace(settings.algo, kl_coef=weight))
    training_loop.fills_batch(rollouts, fixed, ALGORITHMS["rloo"])
    minibatches = training_batch.prepare_training_batch(
        rollouts, fixed, Scripted(), algorithm=ALGORITHMS["rloo"], fetch_images=lambda needed: None, step=0
    )
    return {token: value for batches in minibatches for batch in batches for token, value in by_token(batch, batch.advantage_T).items()}


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_a_run_that_goes_on_has_the_weight_it_had(stopped_after: int, random_model: Path, tmp_path: Path) -> None:
    """A resumed run has the same KL coefficients as an uninterrupted run, bit for bit, whether it
    was stopped after a step that changed the coefficient or after the step that did not.
    """
    unbroken = live(adapting(tmp_path / "unbroken", random_model, in_reward=False))
    settings = adapting(tmp_path / "run", random_model, in_reward=False)
    first, second = live(settings, stopped_after=stopped_after), live(settings)
    assert second.told[0] == f"load step_{stopped_after:08d}"
    assert first.weights + second.weights == unbroken.weights and len(set(unbroken.weights)) == 5
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "unbroken")


def test_a_weight_that_is_fixed_is_no_metric(random_model: Path, tmp_path: Path) -> None:
    policy = live(settings_of(tmp_path, random_model, AlgoSettings(name="rloo", kl_coef=0.5, kl_estimator="k1")))
    assert policy.weights == [0.5] * 5 and not any("policy/kl_coef" in line for line in lines_of(tmp_path))


def test_while_a_critic_warms_up_nothing_pulls_at_the_policy(random_model: Path, tmp_path: Path) -> None:
    """The KL coefficient is not adapted during critic warmup, when the KL is 0 and far below its
    target.
    """
    kl = {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 36}
    live(settings_of(tmp_path, random_model, AlgoSettings(name="ppo", **kl), warmup_steps=4))
    found = [line.get("policy/kl_coef") for line in lines_of(tmp_path)]
    assert found == [None] * 4 + [0.5, pytest.approx(0.5 * 0.95)], "9 episodes of 36; of these groups nobody is left out"
