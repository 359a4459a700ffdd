"""Choices by name in the settings: built-in tasks and rewards, and those of a user."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    JudgeSettings,
    ModelSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.preflight.settings import check_same_inputs, check_sizes
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rollout.task import Env, Task
from megatron_rl.types import Example
from tests.support.qwen3 import qwen3_4b_spec


class OwnTask(Task):
    @dataclass
    class Options:
        size: int = 3

    def examples(self, split: str) -> list[Example]:
        return []

    def env(self, example: Example) -> Env:
        raise NotImplementedError


OWN = Plugins(tasks={"own": OwnTask}, rewards={"short": lambda reply: -len(reply), "kind": lambda: 1})


def parts_of(name: str, reward: str) -> list[str]:
    data = DataSettings(eval=["held_out.jsonl"])
    return list(build_task(TaskSettings(name=name, reward=reward, data=data, max_turns=3), OWN).rubric.terms)


def test_a_reward_is_chosen_by_its_name() -> None:
    assert parts_of("vqa", "") == parts_of("vqa", "accuracy") == ["accuracy"]
    assert parts_of("vqa", "short") == parts_of("number_line", "short") == parts_of("own", "short") == ["short"]
    assert parts_of("vqa", "kind+accuracy+short") == ["accuracy", "kind", "short"]
    assert parts_of("own", "") == parts_of("number_line", "") == []


@pytest.mark.parametrize(
    ("name", "reward", "remedy"),
    [
        ("vqa", "deepeyes", "task vqa accepts accuracy, short, kind; at most one built-in reward, joined with your own by +"),
        ("visual_python", "accuracy+tapo", "task visual_python accepts accuracy, pyvision, deepeyes, codev, tapo, short, kind; "),
        ("vqa", "accuracy+shrot", "task vqa accepts accuracy, short, kind; "),
        ("number_line", "accuracy", "task number_line accepts short, kind"),
    ],
)
def test_a_reward_that_there_is_not(name: str, reward: str, remedy: str) -> None:
    """An unknown or unsuitable task.reward is refused with the rewards that the task accepts."""
    with pytest.raises(ValueError, match=f"^{re.escape(f'task.reward={reward}: {remedy}')}"):
        parts_of(name, reward)
    with pytest.raises(ValueError, match=r"^task.reward=short: task number_line accepts only its own reward$"):
        build_task(TaskSettings(name="number_line", reward="short"))


def test_a_task_is_a_subclass() -> None:
    class Looks:
        pass

    with pytest.raises(ValueError, match=r"^tasks\['looks'\]=<class .*Looks'>: must be a subclass of megatron_rl.rollout.task.Task$"):
        build_task(TaskSettings(name="looks"), Plugins(tasks={"looks": Looks}))


def test_half_a_task() -> None:
    """A task class without `env` is refused."""

    class Half(Task):
        def examples(self, split: str) -> list[Example]:
            return []

    with pytest.raises(ValueError, match=r"^tasks\['half'\]=Half: does not implement env$"):
        build_task(TaskSettings(name="half"), Plugins(tasks={"half": Half}))


def test_options_that_cannot_be_kept() -> None:
    """Options that YAML cannot store are refused, because config.yaml stores a run's options and a
    resumed run compares them.
    """
    with pytest.raises(
        ValueError, match=r"^task.options=.*PosixPath.*: must be storable as YAML; use only numbers, strings, lists and mappings$"
    ):
        build_task(TaskSettings(name="own", options=OwnTask.Options(size=Path("/"))), OWN)


def test_a_judge_that_nobody_asks() -> None:
    with pytest.raises(ValueError, match=r"^task.judge.model=judge: task number_line uses no judge; remove this setting$"):
        build_task(TaskSettings(name="number_line", judge=JudgeSettings(model="judge", urls=["http://a"])))


def test_options_are_of_a_task_that_has_some() -> None:
    """task.options are refused for a task without options and for a task with other options."""
    assert build_task(TaskSettings(name="own", options=OwnTask.Options(size=4)), OWN).settings.options.size == 4
    with pytest.raises(ValueError, match=r"^task.options={'size': 4}: task vqa has no options of its own$"):
        build_task(TaskSettings(name="vqa", options={"size": 4}), OWN)
    with pytest.raises(ValueError, match=r"^task.options={'size': 4}: are options of a different task; choose task=number_line$"):
        build_task(TaskSettings(name="number_line", options={"size": 4}), OWN)


MODEL = load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct")
VISION, FAMILY = MODEL.vision, MODEL.family


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(MODEL, vision=replace(VISION, patch_size=16)), "patch_size=16, the policy has 14"),
        (replace(MODEL, vision=replace(VISION, temporal_patch_size=1)), "temporal_patch_size=1, the policy has 2"),
        (replace(MODEL, vision=replace(VISION, spatial_merge_size=3)), "spatial_merge_size=3, the policy has 2"),
        (replace(MODEL, vision=replace(VISION, in_channels=4)), "in_channels=4, the policy has 3"),
        (replace(MODEL, image_token_id=7), "image_token_id=7, the policy has 151655"),
        (replace(MODEL, vision_end_id=7), "vision_end_token_id=7, the policy has 151653"),
        (replace(MODEL, family=replace(FAMILY, has_interleaved_mrope=True)), "mrope_interleaved=True, the policy has False"),
        (qwen3_4b_spec(), "patch_size=16, the policy has 14"),
    ],
)
def test_a_critic_that_reads_something_else(other: ModelSpec, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^critic.path=there: has {said}; use a model of the policy's family: "):
        check_same_inputs(other, MODEL, key="critic.path", path="there")


@pytest.mark.parametrize("size", ["3B", "7B", "72B"])
def test_a_critic_of_another_size_reads_the_same(size: str) -> None:
    check_same_inputs(load_known_spec(f"Qwen/Qwen2.5-VL-{size}-Instruct"), MODEL, key="critic.path", path="there")


def settings_of(**algo: object) -> Settings:
    """Return settings with two updates per step."""
    return Settings(
        model=ModelSettings(path="there"), algo=AlgoSettings(**algo), batch=BatchSettings(minibatches=2), run=RunSettings(dir="here")
    )


def test_routing_replay_requires_experts() -> None:
    """A dense model has no experts to replay. Experts of the trainer's own pass require that
    pass.
    """
    experts = load_known_spec("Qwen/Qwen3-VL-30B-A3B-Instruct")
    for replay in ("none", "policy", "rollout"):
        settings = settings_of(routing_replay=replay)
        assert settings.engine.return_routed_experts == (replay == "rollout")
        check_sizes(settings, experts, 1)
    check_sizes(settings_of(), MODEL, 1)
    for key, settings in (
        ("algo.routing_replay=policy", settings_of(routing_replay="policy")),
        ("engine.return_routed_experts=True", replace(settings_of(), engine=EngineSettings(return_routed_experts=True))),
    ):
        with pytest.raises(ValueError, match=rf"^{key}: model.path=there has no experts; leave it out$"):
            check_sizes(settings, MODEL, 1)
    with pytest.raises(ValueError, match=r"^algo.routing_replay=policy: algo.rollout_correction=bypass computes no old logprobs, [^\n]*$"):
        check_sizes(settings_of(routing_replay="policy", rollout_correction="bypass"), experts, 1)
    with pytest.raises(ValueError, match=r"^algo.routing_replay=R3: "):
        settings_of(routing_replay="R3")


@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_losses_of_routers_require_experts(key: str) -> None:
    """A dense model has no routers. Coefficients are finite and not negative."""
    settings = settings_of(**{key: 0.5})
    check_sizes(settings, load_known_spec("Qwen/Qwen3-VL-30B-A3B-Instruct"), 1)
    with pytest.raises(ValueError, match=rf"^algo.{key}=0.5: model.path=there has no experts; leave it out$"):
        check_sizes(settings, MODEL, 1)
    for value in (-0.5, math.inf):
        with pytest.raises(ValueError, match=rf"^algo.{key}={value}: must be a finite, non-negative number$"):
            settings_of(**{key: value})
