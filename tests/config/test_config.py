"""An error about an invalid value names the key that the user has to change."""

import math
import re
from dataclasses import is_dataclass
from typing import get_type_hints

import pytest

from megatron_rl.algo.algorithms import check_algorithm
from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    EngineSettings,
    FilterSettings,
    LoraSettings,
    OptimSettings,
    RolloutStoreSettings,
    RunSettings,
    ServiceSettings,
    ServicesSettings,
    Settings,
    SftSettings,
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (OptimSettings, {"schedule": "steep"}, "optim.schedule=steep: choose one of constant, linear, cosine"),
        (OptimSettings, {"lr": -1.0}, "optim.lr=-1.0: must be a finite, non-negative number"),
        (OptimSettings, {"lr": 0.1, "min_lr": 0.2}, "optim.min_lr=0.2: must be between 0 and optim.lr=0.1"),
        (OptimSettings, {"clip_grad": 0.0}, "optim.clip_grad=0.0: must be positive"),
        (OptimSettings, {"beta2": 1.0}, r"optim.beta2=1.0: must be in \[0, 1\)"),
        (OptimSettings, {"lr_by_module": {"head": 1.0}}, "optim.lr_by_module=head: choose one of"),
        (AlgoSettings, {"kl_coef": -0.1}, "algo.kl_coef=-0.1: "),
        (AlgoSettings, {"entropy_coef": -0.1}, "algo.entropy_coef=-0.1: must be a finite, non-negative number"),
        (AlgoSettings, {"std_eps": -1e-6}, "algo.std_eps=-1e-06: "),
        (AlgoSettings, {"temperature": 0.009}, "algo.temperature=0.009: .*vLLM"),
        (AlgoSettings, {"temperature": 2.1}, "algo.temperature=2.1: .*vLLM"),
        (AlgoSettings, {"use_kl_in_reward": True}, "algo.use_kl_in_reward=True: requires a positive algo.kl_coef"),
        (BatchSettings, {"micro_batch_tokens": 0}, "batch.micro_batch_tokens=0: "),
        (BatchSettings, {"loss_agg_mode": "mean"}, "batch.loss_agg_mode=mean: choose one of"),
        (BatchSettings, {"loss_scale_factor": 9}, "batch.loss_scale_factor=9: must be positive with batch.loss_agg_mode=fixed_length"),
        (BatchSettings, {"prompts_per_step": 5, "minibatches": 2}, "batch.prompts_per_step=5: must be divisible by batch.minibatches=2"),
        (BatchSettings, {"group_size": 0}, "batch.group_size=0: "),
        (FilterSettings, {"drop": ["bad"]}, "filter.drop=bad: choose one of"),
        (FilterSettings, {"max_num_gen_batches": 0}, "filter.max_num_gen_batches=0: "),
        (SftSettings, {"num_demonstrations": 0}, "sft.num_demonstrations=0: "),
        (SftSettings, {"splits": ["a", "b"], "steps": [-5, 10]}, r"sft.steps=\[-5, 10\]: "),
        (SftSettings, {"splits": [], "steps": []}, r"sft.steps=\[\]: "),
        (EngineSettings, {"bucket_mib": 0}, "engine.bucket_mib=0: "),
        (RunSettings, {"dir": "r", "max_failed_fraction": 1.0}, "run.max_failed_fraction=1.0: "),
        (RunSettings, {"dir": "r", "max_staleness": -1}, "run.max_staleness=-1: must not be negative; 0 waits for every episode$"),
        (RolloutStoreSettings, {"keep_best": -1}, "rollouts.keep_best=-1: "),
        (Settings, {"lora": LoraSettings(rank=4, dropout=0.1)}, "lora.dropout=0.1: must be 0 in stage=rl"),
    ],
)
def test_what_could_only_end_in_a_traceback_is_refused_at_once(settings: type, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        settings(**values)


def test_the_warm_start_may_have_dropout() -> None:
    """LoRA dropout is accepted with stage=sft."""
    assert Settings(stage="sft", lora=LoraSettings(rank=4, dropout=0.1)).lora.dropout == 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "ppq"}, "algo.name=ppq: choose one of grpo, rloo, .*dppo"),
        ({"turn_credit": "turn_group"}, "algo.turn_credit=turn_group: choose one of broadcast, outcome_and_turn, return_to_go"),
        ({"kl_estimator": "k4"}, "algo.kl_estimator=k4: choose one of k1, k2, k3"),
        ({"rollout_correction": "tis"}, "algo.rollout_correction=tis: choose one of none, bypass, token_tis"),
        (
            {"name": "rloo", "turn_credit": "return_to_go"},
            "algo.turn_credit=return_to_go: algo.name=rloo assigns one advantage per episode; use broadcast",
        ),
    ],
)
def test_names_are_those_of_the_tables(values: dict, message: str) -> None:
    """An unknown or unsupported algorithm, turn credit, KL estimator or correction is refused with
    the valid names.
    """
    with pytest.raises(ValueError, match=f"^{message}"):
        check_algorithm(AlgoSettings(**values))


WRONG = {int: (-(10**9), 10**9), float: (-1e9, math.inf, math.nan), str: ("no such choice", "@")}
"""Wrong values by type; a field that refuses any value of its type refuses one of these."""


def settings_by_key(kind: type, prefix: str = "") -> dict[str, type]:
    """Return {dotted key: type} for every field of these settings, including nested ones."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        found[prefix + name] = hint
        if is_dataclass(hint):
            found |= settings_by_key(hint, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize(
    ("stage", "run", "rollouts", "line"),
    [
        ("rl", {"mode": "rollout_only"}, {}, "run.mode=rollout_only: requires rollouts.save=all"),
        ("rl", {"mode": "rollout_only", "max_staleness": 1}, {"save": "all"}, "run.max_staleness=1: "),
        ("rl", {"mode": "replay"}, {}, "run.mode=replay: requires rollouts.replay_from=RUN/rollouts"),
        ("rl", {"mode": "replay", "eval_every": 2}, {"replay_from": "there"}, "run.eval_every=2: a replay has no engine"),
        ("sft", {"mode": "replay"}, {"replay_from": "there"}, "run.mode=replay: requires stage=rl"),
    ],
)
def test_a_mode_has_what_it_needs(stage: str, run: dict[str, object], rollouts: dict[str, str], line: str) -> None:
    """run.mode is refused without the settings that the mode requires, or with settings that
    contradict it.
    """
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        Settings(stage=stage, run=RunSettings(dir="there", **run), rollouts=RolloutStoreSettings(**rollouts))


def refusal(kind: type, key: str, name: str, value: object) -> str:
    """Return the error for a wrong value of one field, or "". A service is validated as part of
    ServicesSettings.
    """
    try:
        if kind is ServiceSettings:
            ServicesSettings(**{key.split(".")[1]: ServiceSettings(**{"kind": "sandbox", name: value})})
        else:
            kind(**{name: value})
    except ValueError as error:
        return str(error)
    return ""


def test_a_refusal_names_a_key_that_exists() -> None:
    """Wrong values are given to every number and text of the settings. Each error starts with the
    dotted key of an existing field.
    """
    keys, named = settings_by_key(Settings), set()
    owners = {"": Settings} | {key: hint for key, hint in keys.items() if is_dataclass(hint)}
    for key, hint in keys.items():
        owner, _, name = key.rpartition(".")
        for value in WRONG.get(hint, ()):
            line = refusal(owners[owner], key, name, value)
            found = line.partition("=")[0]
            assert not line or found in keys, line
            named |= {found} - {""}
    assert len(named) > 80, sorted(named)
