"""Wiring in build.py: each setting, with a distinct value, reaches the object that uses it.
tests/e2e runs complete runs.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from megatron_rl import build
from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    CriticSettings,
    EngineSettings,
    FilterSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    RunSettings,
    Settings,
    SftSettings,
    TaskSettings,
)
from megatron_rl.distributed.world import World
from megatron_rl.entrypoints import train
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.manager import RankCollectives, RunCallbacks
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.run.directory import LENGTH_KEYS

SETTINGS = Settings(
    model=ModelSettings(path="folder"),
    task=TaskSettings(
        name="mine", max_turns=3, max_new_tokens=40, max_pixels=5000, max_seconds=6.5, env_timeout_s=8.5, stop_on_tool_error=True
    ),
    engine=EngineSettings(max_model_len=700, max_images=2, max_num_seqs=77),
    batch=BatchSettings(prompts_per_step=8, group_size=9),
    filter=FilterSettings(max_num_gen_batches=10),
    algo=AlgoSettings(temperature=0.7),
    run=RunSettings(seed=11, steps=60, max_staleness=2, outage_timeout_s=98.5),
)


@pytest.mark.parametrize(("tp", "index", "num_engines"), [(1, 5, 6), (2, 2, 3)])
def test_a_fleet_is_built_of_its_settings(monkeypatch: pytest.MonkeyPatch, tp: int, index: int, num_engines: int) -> None:
    """The rollout manager of rank 5 of 6 gets its settings, with one engine per rank and with one
    engine per two neighboring ranks.
    """
    groups: list[list[int]] = []
    monkeypatch.setattr(build.dist, "new_group", lambda ranks, backend, timeout: groups.append(ranks) or ranks)
    monkeypatch.setattr(build, "ColocatedEngine", lambda path, settings, **given: SimpleNamespace(path=path, settings=settings, **given))
    monkeypatch.setattr(build, "default_store", lambda: "store")
    monkeypatch.setattr(SETTINGS.engine, "tp", tp)
    renderer = SimpleNamespace(special_tokens="tokens", final_pixels=(111, 222))
    policy = object()
    world = World(rank=5, size=6, local_rank=1, device=torch.device("cpu"))
    gallery = SimpleNamespace(gather_rollouts="gather", all_gather="share", is_local="local")
    callbacks = RunCallbacks(log=lambda line: None)
    given = {"trainer": policy, "renderer": renderer, "world": world, "image_exchange": gallery, "callbacks": callbacks}
    fleet = build.build_rollout_manager(SETTINGS, "task", **given)
    assert fleet.callbacks is callbacks
    assert fleet.collectives == RankCollectives(gather_rollouts="gather", all_gather="share", is_local="local")
    assert (fleet.task, fleet.renderer, fleet.trainer) == ("task", renderer, policy)
    assert fleet.engine_rank == EngineRank(index=index, num_engines=num_engines, max_episodes=77, counter="store")
    assert fleet.generation_settings == GenerationSettings(
        num_prompts=8, group_size=9, max_num_gen_batches=10, max_staleness=2, num_steps=60, outage_timeout_s=98.5
    )
    assert fleet.episode_settings == EpisodeSettings(
        temperature=0.7, max_turns=3, max_new_tokens=40, max_sequence_tokens=700, max_images=2, max_pixels=5000, max_seconds=6.5,
        env_timeout_s=8.5, stop_on_tool_error=True, seed=11,
    )  # fmt: skip
    assert groups == ([] if tp == 1 else [[0, 1], [2, 3], [4, 5]])
    expected = {
        "path": "folder",
        "settings": SETTINGS.engine,
        "special_tokens": "tokens",
        "reads_weights": False,
        "pixels": (111, 222),
        "timeout_s": SETTINGS.parallel.timeout_s,
    }
    assert vars(fleet.engine) == {**expected, "group": None if tp == 1 else [4, 5]}


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize(("rank", "device", "kind"), [(0, "cpu", "gloo"), (0, "cuda", "nccl"), (2, "cpu", None)])
def test_a_fleet_of_engines_elsewhere(monkeypatch: pytest.MonkeyPatch, rank: int, device: str, kind: str | None, is_own: bool) -> None:
    """Every rank uses all servers, and each rank starts with a different one. Rank 0 locks the
    servers and sends them weights. Servers that the run has started itself need not be locked: one
    of them that is down at startup has failed.
    """
    monkeypatch.setattr(build, "default_store", lambda: "store")
    monkeypatch.setattr(build, "run_on_rank_zero", lambda act: act() if rank == 0 else "0123abcd")
    monkeypatch.setattr(build, "expected_engine_fingerprint", lambda settings, renderer: "wanted")
    claims: list[bool] = []
    monkeypatch.setattr(
        build, "WeightSender", lambda servers, **given: SimpleNamespace(servers=servers, lock_servers=lambda: claims.append(True), **given)
    )
    monkeypatch.setattr(build, "ServerEngine", lambda servers, settings, **given: SimpleNamespace(urls=servers, settings=settings, **given))
    given = EngineSettings(mode="server", urls=["http://a:1", "http://b:1", "http://c:1"], max_num_seqs=10, bucket_mib=0.5)
    settings = replace(SETTINGS, engine=given)
    decode = object()
    renderer = SimpleNamespace(special_tokens="tokens", tokenizer=SimpleNamespace(decode=decode))
    world = World(rank=rank, size=6, local_rank=rank, device=torch.device(device))
    gallery = SimpleNamespace(gather_rollouts="gather", all_gather="share", is_local="local")
    trainer, supervisor = build.NoOffload(), object() if is_own and rank == 0 else None
    fleet = build.build_rollout_manager(
        settings, "task", trainer=trainer, renderer=renderer, world=world, image_exchange=gallery, callbacks=RunCallbacks(),
        supervisor=supervisor,
    )  # fmt: skip
    assert fleet.engine_rank == EngineRank(index=rank, num_engines=6, max_episodes=5, counter="store"), "3 servers of 10 replies, 6 ranks"
    engine = fleet.engine
    assert [server.url for server in engine.urls] == given.urls and engine.settings is given
    assert (engine.special_tokens, engine.decode_tokens) == ("tokens", decode)
    assert (engine.all_gather, engine.first_server) == ("share", rank)
    assert (engine.control.sender is None) == (kind is None) and claims == [True] * (rank == 0 and not is_own)
    assert engine.control.supervisor is supervisor
    if kind is not None:
        sender = engine.control.sender
        assert (sender.kind, sender.expected, sender.bucket_bytes, sender.timeout_s) == (kind, "wanted", 2**19, settings.parallel.timeout_s)
        assert f"/{Path(settings.run.dir).name} ({os.getpid()} on " in sender.owner


@pytest.mark.parametrize("folder", ["/home/a/runs/mine", "/tmp/runs/mine", "/data.d/x/runs/mine", "runs/mine"])
def test_whose_a_server_is_passes_what_vllm_strikes(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The owner name contains no path that vLLM removes from messages. Oracle: vLLM's
    sanitize_message, which would change the full path of the run directory.
    """
    monkeypatch.chdir(tmp_path)
    line = f"this engine is in use by {build.make_owner_name(replace(SETTINGS, run=replace(SETTINGS.run, dir=folder)), '0a1b')}"
    assert sanitize_message(line) == line and "by runs/mine (" in line
    assert folder.startswith("/data") or folder == "runs/mine" or folder not in sanitize_message(f"in use by {folder} (1)")


@pytest.mark.parametrize(
    ("is_rl", "kl_coef", "temperature", "keep"), [(True, 0.1, 0.7, True), (True, 0.0, 0.7, False), (False, 0.1, 1.0, False)]
)
@pytest.mark.parametrize(("trunk", "has_values", "has_head"), [("shared", True, True), ("own", True, False), ("shared", False, False)])
def test_a_policy_is_built_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, is_rl: bool, kl_coef: float, temperature: float, keep: bool, trunk: str, has_values: bool,
    has_head: bool,
) -> None:  # fmt: skip
    """The policy gets its settings. SFT uses temperature 1 and no reference model, regardless of
    algo. A value head is built if values are computed from the policy's backbone.
    """
    monkeypatch.setattr(build, "Policy", lambda model, layout, **given: {"model": model, "layout": layout, **given})
    settings = replace(
        SETTINGS,
        algo=AlgoSettings(temperature=0.7, kl_coef=kl_coef, router_aux_loss_coef=0.5, router_z_loss_coef=0.25),
        optim=OptimSettings(lr=0.25), lora=LoraSettings(rank=3),
        parallel=ParallelSettings(log_probs_chunk_size=77), engine=EngineSettings(bucket_mib=0.5), critic=CriticSettings(backbone=trunk,
        cliprange_value=0.4),
    )  # fmt: skip
    renderer = SimpleNamespace(special_tokens="tokens")
    built = build.build_policy(settings, "layout", renderer, patches="patches", num_steps=123, is_rl=is_rl, has_value_head=has_values)
    assert built == {
        "model": settings.model, "layout": "layout", "special_tokens": "tokens", "temperature": temperature, "keep_reference": keep,
        "training": TrainingSettings(
            parallel=settings.parallel, optim=settings.optim, num_steps=123, lora=settings.lora, seed=11,
            router_loss_coefs=(0.5, 0.25),
        ),
        "bucket_mib": 0.5, "critic": settings.critic if has_head else None, "patches": "patches",
    }  # fmt: skip


def test_a_critic_is_built_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's optimizer has the policy's settings except for the learning rate."""
    monkeypatch.setattr(build, "Critic", lambda critic, layout, **given: {"critic": critic, "layout": layout, **given})
    optim = OptimSettings(lr=0.25, lr_by_module={"vision": 0.5}, eps=1e-3, clip_grad=0.1)
    settings = replace(SETTINGS, optim=optim, critic=CriticSettings(backbone="own", lr=0.125, lora=LoraSettings(rank=5)))
    assert build.build_critic(settings, "layout", patches="patches", num_steps=123) == {
        "critic": settings.critic, "layout": "layout", "model": settings.model, "patches": "patches",
        "training": TrainingSettings(
            parallel=settings.parallel, optim=OptimSettings(lr=0.125, eps=1e-3, clip_grad=0.1), num_steps=123, lora=LoraSettings(rank=5),
            seed=11,
        ),
    }  # fmt: skip


def test_policy_and_critic_leave_and_come_back_together() -> None:
    """The policy is offloaded last and reloaded first, because its weights are streamed to the
    engine.
    """
    said: list[str] = []
    policy, critic = (
        SimpleNamespace(sleep=partial(said.append, f"{name} sleeps"), wake=partial(said.append, f"{name} wakes"))
        for name in ("policy", "critic")
    )
    both = build.PolicyAndCritic(policy, critic)
    both.sleep()
    both.wake()
    assert said == ["critic sleeps", "policy sleeps", "policy wakes", "critic wakes"]


def test_stages_say_what_they_span_and_read() -> None:
    """Each stage has its number of steps, the splits that it reads, and whether it uses
    rollouts.
    """
    settings = replace(SETTINGS, run=RunSettings(steps=7), sft=SftSettings(splits=["a", "b"], steps=[30, 4]))
    found = {name: (stage.num_steps(settings), stage.splits, stage.is_rl) for name, stage in train.STAGES.items()}
    assert found == {"rl": (7, ("train", "eval"), True), "sft": (34, ("eval",), False)}
    assert train.STAGES.keys() == LENGTH_KEYS.keys()
