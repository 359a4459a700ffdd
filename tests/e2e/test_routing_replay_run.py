"""Short runs with images and two turns, in which the engine chooses experts by other logits than
the trainer.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.e2e.test_resume import alike, content, end, kill_when_there_is
from tests.support import fork_server

GAP, SHARES = "rollout_mismatch/logprob_abs_diff_max", ("routing_replay/token_layer_diff_fraction", "routing_replay/token_diff_fraction")


def write_model(folder: Path, family: str = "qwen3_vl_moe") -> Path:
    make_checkpoint(folder / "model", family=family, init="random", seed=1, vision_depth=2)
    return folder / "model"


def run_steps(torchrun: Callable[..., str], model: Path, folder: Path, *arguments: object, ranks: int = 1) -> list[dict[str, float]]:
    torchrun(ranks, SUPPORT / "routing_run.py", model, folder, *arguments)
    return [step for step in read_metrics(folder / "metrics.jsonl") if "grad_norm" in step]


@pytest.mark.parametrize("family", ["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
def test_replayed_experts_are_those_of_the_engine(family: str, torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With algo.routing_replay=rollout, the logprobs of engine and trainer agree in both steps,
    with old logprobs and two updates in each. A replay of the recorded rollouts has the same metrics.
    """
    model = write_model(tmp_path, family)
    steps = run_steps(torchrun, model, tmp_path / "run", "rollout", 1)
    assert len(steps) == 2 and all(step[GAP] <= 1e-4 and step["grad_norm"] > 0 and step["rollout/failed"] == 0 for step in steps)
    assert all(step[SHARES[1]] > 0.9 and 0.5 < step[SHARES[0]] < step[SHARES[1]] for step in steps)
    recorded = read_rollouts(step_path(tmp_path / "run" / "rollouts", 1))
    assert all(len(context.routed_experts) >= context.loss_mask.index(1) for rollout in recorded for context in rollout.sequences)
    again = run_steps(torchrun, model, tmp_path / "again", "rollout", 1, tmp_path / "run" / "rollouts")
    names = ("loss", "grad_norm", "policy/kl_ref", GAP, *SHARES)
    assert len(again) == 2
    for one, other in zip(steps, again, strict=True):
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("replay", "ranks", "engine_tp"), [("rollout", 2, 1), ("rollout", 2, 2), ("policy", 1, 1), ("policy", 2, 1), ("none", 1, 1)]
)
def test_other_settings(replay: str, ranks: int, engine_tp: int, torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With tensor and sequence parallelism, the experts of two engines, and those of one engine on
    both ranks, are replayed as well. Without them, the logprobs differ by more than 0.1. The
    experts of the trainer's own pass differ from those of the second of two updates only.
    """
    steps = run_steps(torchrun, write_model(tmp_path), tmp_path / "run", replay, engine_tp, ranks=ranks)
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert all(step[GAP] <= 1e-4 if replay == "rollout" else step[GAP] >= 0.1 for step in steps)
    assert all((SHARES[0] in step) == (replay != "none") for step in steps)
    if replay == "policy":
        assert all(0 < step[SHARES[0]] <= step[SHARES[1]] <= 0.5 for step in steps)
        assert all(step["policy/first_ratio"] == pytest.approx(1, abs=1e-5) for step in steps)


@pytest.mark.long
@pytest.mark.parametrize("replay", ["rollout", "policy"])
def test_a_killed_run_goes_on_as_the_run_that_was_not_killed(replay: str, tmp_path: Path) -> None:
    """A run of four steps is killed after its second checkpoint and started again. Its metrics, its
    rollouts with their experts and its final weights are those of a run that was never killed and
    wrote no checkpoint, bit for bit.
    """
    model, runs = write_model(tmp_path), {name: tmp_path / name for name in ("unbroken", "killed")}

    def begin(name: str, *options: object) -> fork_server.Process:
        return fork_server.Process(SUPPORT / "routing_run.py", model, runs[name], replay, 1, "--steps", 4, *options)

    end(begin("unbroken"))
    kill_when_there_is(runs["killed"] / "checkpoints" / "step_00000002", begin("killed", "--checkpoint-every", 1))
    assert not (runs["killed"] / "final").exists()
    end(begin("killed", "--checkpoint-every", 1))
    unbroken, killed = ([alike(line) for line in read_metrics(run / "metrics.jsonl")] for run in runs.values())
    assert killed == unbroken and sum("grad_norm" in line and SHARES[0] in line for line in unbroken) == 4
    for folder in ("final", "rollouts"):
        files = {path.relative_to(runs["unbroken"]) for path in (runs["unbroken"] / folder).rglob("*") if path.is_file()}
        assert files == {path.relative_to(runs["killed"]) for path in (runs["killed"] / folder).rglob("*") if path.is_file()}
        assert files and not [file for file in files if content(runs["killed"] / file) != content(runs["unbroken"] / file)]
    recorded = read_rollouts(step_path(runs["killed"] / "rollouts", 3))
    assert all(bool(context.routed_experts) == (replay == "rollout") for rollout in recorded for context in rollout.sequences)


def sampled_tokens(run: Path, step: int) -> list[list[tuple[int, float]]]:
    """Return, for each sequence of a step, the weight version of each sampled token and the
    difference of its logprobs in engine and trainer.
    """
    found = []
    for rollout in read_rollouts(step_path(run / "rollouts", step), with_images=False):
        for context in rollout.sequences:
            rows = zip(context.weight_versions, context.rollout_logprobs, context.old_logprobs, context.loss_mask, strict=True)
            found.append([(version, abs(ours - theirs)) for version, theirs, ours, is_sampled in rows if is_sampled])
    return found


@pytest.mark.long
def test_experts_of_episodes_that_continue_across_updates(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With run.max_staleness=1, turns and their experts come from different weight versions. If the
    versions have equal weights (learning rate 0), the trainer's logprob of every token, stale ones
    included, equals the engine's: no token lacks its experts or has those of another.
    """
    steps = run_steps(torchrun, write_model(tmp_path), tmp_path / "run", "rollout", 1, "--stale", "--steps", 8, "--lr", 0.0)
    found = [(step, tokens) for step in range(8) for tokens in sampled_tokens(tmp_path / "run", step)]
    assert len(steps) == 8 and all(step["rollout/failed"] == 0 for step in steps)
    assert any(len({version for version, _ in tokens}) > 1 for _, tokens in found), "no sequence has two versions"
    assert any(version < step for step, tokens in found for version, _ in tokens), "no token is stale"
    assert max(difference for _, tokens in found for _, difference in tokens) <= 1e-4
    assert all(step[SHARES[1]] > 0.9 for step in steps)


@pytest.mark.long
def test_experts_of_fresh_sequences_among_stale_ones(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With changing weights, sequences that were sampled by the step's own weights alone have equal
    logprobs in engine and trainer, although others in the batch are stale.
    """
    steps = run_steps(torchrun, write_model(tmp_path), tmp_path / "run", "rollout", 1, "--stale", "--steps", 8, "--lr", 1e-3)
    found = [(step, tokens) for step in range(8) for tokens in sampled_tokens(tmp_path / "run", step)]
    fresh = [difference for step, tokens in found if {version for version, _ in tokens} == {step} for _, difference in tokens]
    assert len(steps) == 8 and len(fresh) > 100 and max(fresh) <= 1e-4
    assert any(version < step for step, tokens in found for version, _ in tokens), "no token is stale"
