"""The composition root's wiring: which setting goes where, each with a value of its own. Whole runs: tests/e2e."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import start
from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    RunSettings,
    SelectSettings,
    Settings,
    SftSettings,
    TaskSettings,
)
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.fleet import RoundSettings
from megatron_rl.tasks.base import Env, Task
from megatron_rl.types import Example
from megatron_rl.world import World

SETTINGS = Settings(
    model=ModelSettings(path="folder"),
    task=TaskSettings(name="mine", max_turns=3, max_tokens_per_turn=40, max_pixels=5000, max_seconds=6.5, errors_end=True),
    engine=EngineSettings(max_model_len=700, max_images=2),
    batch=BatchSettings(prompts_per_step=8, group_size=9),
    select=SelectSettings(max_generations=10),
    algo=AlgoSettings(temperature=0.7),
    run=RunSettings(seed=11),
)


@pytest.mark.parametrize(("tp", "index", "num_engines"), [(1, 5, 6), (2, 2, 3)])
def test_a_fleet_is_built_of_its_settings(monkeypatch: pytest.MonkeyPatch, tp: int, index: int, num_engines: int) -> None:
    """Rank 5 of 6, with an engine on every rank and with one over two neighbors each."""
    groups: list[list[int]] = []
    monkeypatch.setattr(start.dist, "new_group", lambda ranks, backend: groups.append(ranks) or ranks)
    monkeypatch.setattr(start, "LocalEngine", lambda path, settings, **given: SimpleNamespace(path=path, settings=settings, **given))
    monkeypatch.setattr(SETTINGS.engine, "tp", tp)
    renderer, policy = SimpleNamespace(image_token_id=1, banned_ids=[2], stop_ids=[3]), object()
    world = World(rank=5, size=6, local_rank=1, device=torch.device("cpu"))
    fleet = start.build_fleet(SETTINGS, "task", policy=policy, renderer=renderer, world=world, tell=print)
    assert (fleet.index, fleet.num_engines, fleet.task, fleet.renderer, fleet.trainer) == (index, num_engines, "task", renderer, policy)
    assert fleet.round_settings == RoundSettings(num_prompts=8, group_size=9, max_rounds=10)
    assert fleet.episode == EpisodeSettings(
        temperature=0.7, max_turns=3, max_tokens_per_turn=40, max_context=700, max_images=2, max_pixels=5000, max_seconds=6.5,
        errors_end=True, seed=11,
    )  # fmt: skip
    assert groups == ([] if tp == 1 else [[0, 1], [2, 3], [4, 5]])
    expected = {"path": "folder", "settings": SETTINGS.engine, "image_token_id": 1, "banned_ids": [2], "stop_ids": [3]}
    assert vars(fleet.engine) == {**expected, "group": None if tp == 1 else [4, 5]}


@pytest.mark.parametrize(
    ("is_rl", "kl_coef", "temperature", "keep"), [(True, 0.1, 0.7, True), (True, 0.0, 0.7, False), (False, 0.1, 1.0, False)]
)
def test_a_policy_is_built_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, is_rl: bool, kl_coef: float, temperature: float, keep: bool
) -> None:
    """In the warm start at temperature 1 and without a reference, whatever algo says."""
    monkeypatch.setattr(start, "Policy", lambda model, layout, **given: {"model": model, "layout": layout, **given})
    settings = replace(
        SETTINGS, algo=AlgoSettings(temperature=0.7, kl_coef=kl_coef), optim=OptimSettings(lr=0.25), lora=LoraSettings(rank=3),
        parallel=ParallelSettings(logprob_rows=77), engine=EngineSettings(bucket_mib=0.5),
    )  # fmt: skip
    renderer = SimpleNamespace(image_token_id=1, banned_ids=[2], stop_ids=[3])
    built = start.build_policy(settings, "layout", renderer, num_steps=123, is_rl=is_rl)
    assert built == {
        "model": settings.model, "layout": "layout", "parallel": settings.parallel, "optim": settings.optim, "num_steps": 123,
        "banned_ids": [2], "image_token_id": 1, "temperature": temperature, "keep_reference": keep, "bucket_mib": 0.5,
        "lora": settings.lora, "seed": 11,
    }  # fmt: skip


def test_stages_say_what_they_span_and_read() -> None:
    settings = replace(SETTINGS, run=RunSettings(steps=7), sft=SftSettings(splits=["a", "b"], steps=[30, 4]))
    found = {name: (stage.steps_key, stage.num_steps(settings), stage.splits, stage.is_rl) for name, stage in start.STAGES.items()}
    assert found == {"rl": ("run.steps", 7, ("train", "eval"), True), "sft": ("sft.steps", 34, ("eval",), False)}


class OwnTask(Task):
    @dataclass
    class Options:
        size: int = 3

    def examples(self, split: str) -> list[Example]:
        return []

    def env(self, example: Example) -> Env:
        raise NotImplementedError


OWN = start.Own(tasks={"own": OwnTask}, rewards={"short": lambda reply: -len(reply), "kind": lambda: 1})


def parts_of(name: str, reward: str) -> list[str]:
    data = DataSettings(eval=["held_out.jsonl"])
    return list(start.build_task(TaskSettings(name=name, reward=reward, data=data, max_turns=3), OWN).rubric.parts)


def test_a_reward_is_chosen_by_its_name() -> None:
    assert parts_of("vqa", "") == parts_of("vqa", "accuracy") == ["accuracy"]
    assert parts_of("vqa", "short") == parts_of("number_line", "short") == parts_of("own", "short") == ["short"]
    assert parts_of("vqa", "kind+accuracy+short") == ["accuracy", "kind", "short"]
    assert parts_of("own", "") == parts_of("number_line", "") == []


@pytest.mark.parametrize(
    ("name", "reward", "remedy"),
    [
        ("vqa", "deepeyes", "task vqa takes accuracy, short, kind; at most one that ships, with your own joined by +"),
        ("visual_python", "accuracy+tapo", "task visual_python takes accuracy, pyvision, deepeyes, codev, tapo, short, kind; "),
        ("vqa", "accuracy+shrot", "task vqa takes accuracy, short, kind; "),
        ("number_line", "accuracy", "task number_line takes short, kind; "),
    ],
)
def test_a_reward_that_there_is_not(name: str, reward: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'task.reward={reward}: {remedy}')}"):
        parts_of(name, reward)
    with pytest.raises(ValueError, match=r"^task.reward=short: task number_line takes none but its own; "):
        start.build_task(TaskSettings(name="number_line", reward="short"))


def test_options_are_of_a_task_that_has_some() -> None:
    assert start.build_task(TaskSettings(name="own", options=OwnTask.Options(size=4)), OWN).settings.options.size == 4
    with pytest.raises(ValueError, match=r"^task.options={'size': 4}: task number_line has no options of its own$"):
        start.build_task(TaskSettings(name="number_line", options={"size": 4}), OWN)
