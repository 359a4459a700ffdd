"""Settings that do not fit the model, the machine or the number of processes are refused before the
processes communicate.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.preflight.settings import check_settings, check_sizes
from megatron_rl.registry import build_task
from tests.contracts.test_configs import settings_of

MISFITS = {  # override: (processes, remedy); the random nano has 4 heads, 2 key/value heads, 4 layers
    "parallel.tp=3": (3, "does not divide the model's 4 attention heads; use one of 1, 2"),
    "parallel.tp=4": (4, "does not divide the model's 2 key/value heads; use one of 1, 2"),
    "parallel.pp=3": (3, "must divide the number of layers of the model (4)"),
    "engine.tp=2": (3, "must divide the number of processes (3)"),
    "engine.tp=4": (4, "does not divide the model's 2 key/value heads; use one of 1, 2"),
    "engine.device=cuda": (1, "this machine has no usable GPU; use engine.device=auto"),
}


FFN = "rows of each MLP (intermediate_size)"


@pytest.mark.parametrize("override", MISFITS)
def test_a_misfit_is_told_with_its_key_and_what_to_do(override: str, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    num_processes, remedy = MISFITS[override]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{override}: {remedy}')}$"):
        check_settings(settings_of(f"model.path={random_model}", "run.dir=there", "task=number_line", override), num_processes)


@pytest.mark.parametrize(
    ("sizes", "override", "remedy"),
    [
        ({"num_heads": 6, "num_kv_heads": 3, "ffn_size": 200}, "parallel.tp=3", f"the model's 200 {FFN}; use one of 1"),
        ({"num_heads": 6, "num_kv_heads": 3, "ffn_size": 210}, "parallel.tp=3", ""),
        ({"num_heads": 6, "num_kv_heads": 6, "ffn_size": 202}, "engine.tp=3", f"the model's 202 {FFN}; use one of 1, 2"),
        (
            {"num_heads": 6, "num_kv_heads": 3, "ffn_size": 210},
            "engine.tp=3",
            "the model's 2 attention heads of the vision tower; use one of 1",
        ),
    ],
)
def test_every_size_that_is_cut_is_looked_at(sizes: dict, override: str, remedy: str, random_model: Path) -> None:
    """Tensor parallelism is refused if it does not divide a size that is sharded: the size of the
    MLP or the number of attention heads in the vision tower.
    """
    model = replace(read_spec(random_model), **sizes)
    settings = settings_of(f"model.path={random_model}", "run.dir=there", "task=number_line", override)
    if not remedy:
        check_sizes(settings, model, 3)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(f'{override}: does not divide {remedy}')}$"):
        check_sizes(settings, model, 3)


def test_tokens_without_a_row_are_refused_before_anything_is_built(random_model: Path, tmp_path: Path) -> None:
    """A tokenizer with ids beyond config.json's vocab_size is refused; the error states the rows of
    the embedding tensors.
    """
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 900
    (folder / "config.json").write_text(json.dumps(config))
    last = max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    said = f"^model.path={folder}: the tokenizer has ids up to {last}, config.json has vocab_size=900, model.embed_tokens.weight has"
    with pytest.raises(ValueError, match=f"{said} 1024 rows, lm_head.weight has 1024 rows; set vocab_size to 1024 in config.json$"):
        check_settings(settings_of(f"model.path={folder}", "run.dir=there", "task=number_line"), 1)


def test_a_frozen_part_beside_adapters(random_model: Path) -> None:
    remedy = r"^model.frozen=\['vision'\]: with lora.rank the whole base model is frozen; choose the trained layers with lora.targets$"
    with pytest.raises(ValueError, match=remedy):
        check_settings(
            settings_of(f"model.path={random_model}", "run.dir=there", "task=number_line", "model.frozen=[vision]", "lora.rank=8"), 1
        )


def test_more_staleness_than_engines_hold(random_model: Path) -> None:
    """Batches of 24 prompts with 8 episodes each: two batches are 384 episodes and three are 576.
    Two engines with tp=2 hold 2 * 192 episodes.
    """
    given = (
        f"model.path={random_model}",
        "run.dir=there",
        "task=number_line",
        "experiment=numberline_grpo_cpu",
        "engine.tp=2",
        "engine.max_num_seqs=192",
    )
    check_settings(settings_of(*given, "run.max_staleness=1"), 4)
    check_settings(settings_of(*given, "run.max_staleness=2", "stage=sft"), 4)
    told = (
        "run.max_staleness=2: 3 times batch.prompts_per_step=24 times batch.group_size=8 episodes are in flight, "
        "but 2 engines run engine.max_num_seqs=192 each; set that to 288"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        check_settings(settings_of(*given, "run.max_staleness=2"), 4)
    check_settings(settings_of(*given, "run.max_staleness=2", "engine.max_num_seqs=288"), 4)
    check_settings(settings_of(*given, "engine.max_num_seqs=1"), 4)


def test_a_teacher_of_the_warm_start_needs_a_divergence(random_model: Path) -> None:
    """Without sampled tokens, a teacher gives neither rewards nor estimates."""
    given = (f"model.path={random_model}", "run.dir=there", "task=number_line", "stage=sft", f"distill.teacher={random_model}")
    check_settings(settings_of(*given, "distill.divergence=jsd", "distill.support=top_k"), 1)
    for override, remedy in (
        ("distill.apply_to=reward", "needs rewards, which stage=sft does not have; use loss"),
        ("distill.support=sampled", "needs tokens that the policy samples; in stage=sft, use full or top_k"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{override}: {remedy}')}$"):
            check_settings(settings_of(*given, override), 1)


def test_demonstrations_among_rollouts(random_model: Path) -> None:
    """Three demonstrations for 8 rollouts are refused where no demonstration can be used, or where a
    mini-batch would have none."""
    given = (f"model.path={random_model}", "run.dir=there", "task=number_line", f"distill.teacher={random_model}")
    mixed = ("distill.data_fraction=0.25", "batch.prompts_per_step=4", "batch.group_size=2", "task.data.demonstrations=[a.jsonl]")
    check_settings(settings_of(*given, *mixed), 1)
    for overrides, refusal in (
        (("stage=sft",), "is for the rollouts of stage=rl; leave it out in stage=sft"),
        (("algo=ppo",), "algo.name=ppo has a critic, and demonstrations have no returns; choose another algorithm"),
        (("task.data.demonstrations=[]",), "needs conversations; set task.data.demonstrations=[FILE.jsonl]"),
        (("batch.minibatches=4",), "gives a step 3 demonstrations, fewer than batch.minibatches=4; use more"),
    ):
        with pytest.raises(ValueError, match=f"^distill.data_fraction=0.25: {re.escape(refusal)}$"):
            check_settings(settings_of(*given, *mixed, *overrides), 1)


def test_ranks_that_divide_experts_have_one_teacher() -> None:
    """With a teacher for each source, ranks would run different numbers of passes and wait for each
    other forever."""
    path = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    given = (f"model.path={path}", "run.dir=there", "task=number_line", f"+distill.teachers={{charts: {path}}}")
    check_sizes(settings_of(*given), load_known_spec(path), 2)
    with pytest.raises(ValueError, match="^parallel.ep=2: needs equally many passes on all ranks, and distill.teachers gives each its own"):
        check_sizes(settings_of(*given, "parallel.ep=2"), load_known_spec(path), 2)


def test_a_merge_of_checkpoints_needs_rewards_and_steps(random_model: Path) -> None:
    given = (f"model.path={random_model}", "run.dir=there", "task=number_line", "distill.merge.method=ties")
    check_settings(settings_of(*given, "run.steps=3", "distill.merge.every=2"), 1)
    for overrides, refusal in (
        (("stage=sft",), "distill.merge.method=ties: merges checkpoints of stage=rl; in stage=sft, use distill.teacher"),
        (("algo=distill",), "distill.merge.method=ties: merges checkpoints of a policy that learns from rewards"),
        (("run.steps=2", "distill.merge.every=2"), "distill.merge.every=2: leaves no step with a teacher (run.steps=2); merge more often"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(refusal)}"):
            check_settings(settings_of(*given, *overrides), 1)


def test_responses_of_a_merge_need_the_engine_of_this_process(random_model: Path) -> None:
    """The engine gets the teacher's weights in each step, so that it must be here, and idle."""
    given = (f"model.path={random_model}", "run.dir=there", "task=number_line", "distill.merge.method=ties", "distill.apply_to=responses")
    check_settings(settings_of(*given), 1)
    check_settings(settings_of(*given, "algo=ppo", "lora.rank=4"), 1)
    for overrides, refusal in (
        (REMOTE, "loads the teacher into the engine of this process, and engine.mode=server has none; use colocated"),
        (("run.max_staleness=1",), "run.max_staleness=1 would continue episodes with the teacher's weights; use 0"),
        (("run.mode=replay", "run.eval_every=0", "rollouts.replay_from=a/rollouts"), "run.mode=replay has no engine for the teacher"),
        (("task.name=agent",), "agents choose stop strings and temperature of each request; use loss or reward"),
    ):
        with pytest.raises(ValueError, match=f"^distill.apply_to=responses: {re.escape(refusal)}"):
            check_settings(settings_of(*given, *overrides), 1)


def test_a_teacher_on_servers_needs_sampled_tokens_at_temperature_1(random_model: Path) -> None:
    server = ("distill.server.urls=[http://teacher:8000]", "distill.apply_to=reward")
    given = (f"model.path={random_model}", "run.dir=there", "task=number_line", *server)
    check_settings(settings_of(*given, "algo=distill"), 1)
    with pytest.raises(ValueError, match=r"^algo.temperature=0.7: servers return logprobs at temperature 1"):
        check_settings(settings_of(*given, "algo.temperature=0.7"), 1)
    with pytest.raises(ValueError, match=r"^run.mode=replay: asks no servers for the teacher's logprobs of recorded rollouts"):
        check_settings(settings_of(*given, "run.mode=replay", "run.eval_every=0", "rollouts.replay_from=a/rollouts"), 1)
    with pytest.raises(ValueError, match=r"^distill.server.urls=\['http://teacher:8000'\]: needs tokens that the policy samples"):
        check_settings(settings_of(*given, "stage=sft"), 1)


REMOTE = ("engine.mode=server", "engine.urls=[http://a:1,http://b:1]")


def test_engines_elsewhere_need_not_divide_the_processes(random_model: Path) -> None:
    """The capacity check uses the number of servers and does not depend on the number of trainer
    processes.
    """
    given = (
        f"model.path={random_model}",
        "run.dir=there",
        "task=number_line",
        "experiment=numberline_grpo_cpu",
        "engine.max_num_seqs=192",
        *REMOTE,
    )
    check_settings(settings_of(*given, "engine.tp=2"), 3)
    check_settings(settings_of(*given, "run.max_staleness=1"), 1)
    for engines in (REMOTE, ("engine.mode=server", "engine.num_local_servers=2", "engine.urls=[]")):
        with pytest.raises(ValueError, match=r"^run.max_staleness=2: .* but 2 engines run engine.max_num_seqs=192 each; set that to 288$"):
            check_settings(settings_of(*given, *engines, "run.max_staleness=2"), 8)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("engine.mode=ray",), "engine.mode=ray: choose one of colocated, server"),
        (
            ("engine.mode=server",),
            "engine.urls=[]: is required by engine.mode=server; set the URLs of running servers, "
            "or let the run start servers: engine.num_local_servers=2",
        ),
        (
            ("engine.num_local_servers=1",),
            "engine.num_local_servers=1: requires engine.mode=server; set this mode, or remove this setting",
        ),
        (
            ("engine.mode=server", "engine.num_local_servers=-1"),
            "engine.urls=[]: is required by engine.mode=server; set the URLs of running servers, or let",
        ),
        ((*REMOTE, "engine.num_local_servers=-1"), "engine.num_local_servers=-1: must not be negative; 0 starts none"),
        (
            (*REMOTE, "engine.num_local_servers=2"),
            "engine.num_local_servers=2: cannot be combined with engine.urls; set only one of the two",
        ),
        (
            (*REMOTE[:1], "engine.num_local_servers=2", "engine.startup_timeout_s=nan"),
            "engine.startup_timeout_s=nan: must be a positive, finite number of seconds",
        ),
        (("engine.urls=[http://a:1]",), "engine.urls=['http://a:1']: requires engine.mode=server; set this mode, or remove this setting"),
        (("engine.mode=server", "engine.urls=[a:1]"), "engine.urls=a:1: is not a valid URL; use http://HOST:PORT"),
        (
            ("engine.mode=server", "engine.urls=[http://a:1,http://a:1/]"),
            "engine.urls=['http://a:1', 'http://a:1/']: contains a server twice; list each server once",
        ),
        ((*REMOTE, "engine.health_timeout_s=0"), "engine.health_timeout_s=0.0: must be a positive, finite number of seconds"),
        ((*REMOTE, "engine.request_timeout_s=-1"), "engine.request_timeout_s=-1.0: must be a positive, finite number of seconds"),
    ],
)
def test_engines_that_cannot_be_asked(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        settings_of("model.path=here", "run.dir=there", "task=number_line", *overrides)


def test_what_fits_is_not_refused(random_model: Path) -> None:
    check_settings(
        settings_of(f"model.path={random_model}", "run.dir=there", "task=number_line", "parallel.tp=2", "parallel.pp=2", "engine.tp=2"), 8
    )


def test_a_layout_needs_its_processes(random_model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"parallel.tp\*parallel.pp=4: must divide the number of processes \(6\); set torchrun's --nproc_per_node"
    ):
        check_settings(settings_of(f"model.path={random_model}", "run.dir=there", "task=number_line", "parallel.tp=2", "parallel.pp=2"), 6)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model.path={tmp_path}: .*use a Hugging Face model folder"):
        check_settings(settings_of(f"model.path={tmp_path}", "run.dir=there", "task=number_line"), 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^model.path={tmp_path}: config.json is damaged"):
        check_settings(settings_of(f"model.path={tmp_path}", "run.dir=there", "task=number_line"), 1)


def test_a_task_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"^task.name=chess: no such task; choose one of .*number_line"):
        build_task(settings_of("model.path=here", "run.dir=there", "task=number_line", "task.name=chess").task)
