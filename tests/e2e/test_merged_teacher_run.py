"""Runs with a merge of their own checkpoints as the teacher: recorded numbers against Hugging
Face's model with weights that the test merges from the run's exported checkpoints, and a killed
run.
"""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import ModelSettings
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from megatron_rl_tools.convert import merger
from tests.conftest import SUPPORT
from tests.e2e.test_distill_run import compare_on, hf_logprobs, with_patches
from tests.e2e.test_resume import begin, content, end, kill_when_there_is, weights_of
from tests.support.game_runs import GAME_OVERRIDES

ALPHA, COEF = 0.25, 0.5
RECORDED = SUPPORT / "recorded_responses_train.py"
SMALL = (
    "batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=0", "optim.lr=3e-3", "algo.entropy_coef=0.1", "rollouts.save=all",
    "checkpoint.every=1", "checkpoint.keep_last=9", "model.min_pixels=12000", "model.max_pixels=13000",
)  # fmt: skip


def export(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a run's checkpoint under Hugging Face's names."""
    out = run.parent / f"{run.name}_{step}"
    if not out.exists():
        assert merger.main(["--checkpoint", str(run / "checkpoints" / f"step_{step:08d}"), "--out", str(out)]) == 0
    return weights_of(out)


def write_model(weights: dict[str, torch.Tensor], like: Path, out: Path) -> Path:
    shutil.copytree(like, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def trained_sequences(run: Path, step: int) -> list[TokenSequence]:
    rollouts = read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")
    return [sequence for rollout in rollouts if rollout.is_trained_on for sequence in rollout.sequences]


def trim(start: dict[str, torch.Tensor], policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the start weights with the largest fifth of the policy's changes."""
    changed = [name for name in start if not torch.equal(start[name], policy[name])]
    change = torch.cat([(policy[name].double() - start[name]).flatten() for name in changed])
    limit = change.abs().sort(descending=True).values[int(0.2 * len(change)) - 1]
    parts = (change * (change.abs() >= limit)).split([start[name].numel() for name in changed])
    return start | {name: start[name].double() + part.view(start[name].shape) for name, part in zip(changed, parts, strict=True)}


def test_a_moving_average_rewards_each_token_and_survives_a_kill(random_model: Path, tmp_path: Path) -> None:
    """The first step has no teacher, and the second one the policy itself. The third one's recorded
    logprobs are Hugging Face's, with the moving average of the checkpoints after the first and the
    second step. A run that was killed after the second step ends with the same bits.
    """
    given = (
        *SMALL, f"model.path={random_model}", "algo=rloo", "distill.merge.method=ema", f"distill.merge.alpha={ALPHA}",
        "distill.apply_to=reward", f"distill.coef={COEF}", "run.steps=3",
    )  # fmt: skip
    run, killed = tmp_path / "run", tmp_path / "killed"
    end(begin(*given, f"run.dir={run}"))
    first, second, third, _ = read_metrics(run / "metrics.jsonl")
    assert not any(trained_sequences(run, 0)[0].teacher_logprobs) and "distill/reverse_kl" not in first
    assert second["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-6), "the only checkpoint is the policy itself"
    assert abs(third["distill/reverse_kl"]) > 1e-3
    one, two = (export(run, step) for step in (1, 2))
    merged = {name: (1 - ALPHA) * one[name].double() + ALPHA * two[name].double() for name in one}
    sequences = trained_sequences(run, 2)
    expected = hf_logprobs(write_model(merged, random_model, tmp_path / "merged"), sequences)
    for sequence, logprobs in zip(sequences, expected, strict=True):
        found = [logprob for logprob, sampled in zip(sequence.teacher_logprobs, sequence.loss_mask, strict=True) if sampled]
        assert found == pytest.approx(logprobs, abs=1e-5)

    kill_when_there_is(killed / "checkpoints" / "step_00000002", begin(*given, f"run.dir={killed}"))
    assert "resume: " in end(begin(*given, f"run.dir={killed}"))
    for file in sorted(run.glob("final/*.safetensors")) + sorted(run.glob("rollouts/*.parquet")):
        assert content(killed / file.relative_to(run)) == content(file), file


def test_a_trimmed_merge_with_adapters_a_critic_and_stale_episodes(random_model: Path, tmp_path: Path) -> None:
    """With LoRA, PPO, one step of critic warm-up and episodes that go on during updates, the third
    step's divergence is Hugging Face's: the policy is the checkpoint after the second step, and the
    teacher has only the largest fifth of its changes."""
    given = ("algo=ppo", "critic.warmup_steps=1", "lora.rank=4", "run.max_staleness=1", "distill.merge.method=ties", "run.steps=3")
    run = tmp_path / "run"
    end(begin(*SMALL, f"model.path={random_model}", *given, "optim.lr=3e-2", f"run.dir={run}"))
    *without, third, _ = read_metrics(run / "metrics.jsonl")
    assert len(without) == 2 and not any("distill/divergence" in step for step in without)
    start, policy = weights_of(random_model), export(run, 2)
    merged = trim(start, policy)
    teacher = write_model(merged, random_model, tmp_path / "merged")
    student = write_model(policy, random_model, tmp_path / "student")
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=12000, max_pixels=13000))
    *_, reverse = compare_on([with_patches(each, renderer) for each in trained_sequences(run, 2)], student, teacher, renderer)
    assert reverse > 1e-3
    assert third["distill/divergence"] == pytest.approx(reverse, rel=1e-4)


@pytest.mark.long
def test_the_teacher_generates_responses_and_survives_a_kill(random_model: Path, tmp_path: Path) -> None:
    """In the third step, the merge of two checkpoints responds in half of the policy's turns.

    Oracle: Hugging Face's model with weights that the test merges. Its logprobs of the responses
    are the engine's, and its negative log-likelihood with the policy's weights is the metric. The
    rollouts of all steps are sampled with the policy's weights. A run that was killed after the
    second step ends with the same bits.
    """
    given = (
        *SMALL, f"model.path={random_model}", "algo=ppo", "distill.merge.method=ema", f"distill.merge.alpha={ALPHA}",
        "distill.apply_to=responses", f"distill.coef={COEF}", "distill.response_fraction=0.5", "run.steps=3",
        "algo.thought_logprob_scale=0.5", "task.max_turns=3",
    )  # fmt: skip
    run, killed = tmp_path / "run", tmp_path / "killed"
    end(begin(*given, f"run.dir={run}", script=RECORDED))
    first, *_, third, _ = metrics = read_metrics(run / "metrics.jsonl")
    assert "distill/response_nll" not in first and "distill/num_responses" not in first
    assert all(step["rollout_mismatch/logprob_abs_diff_max"] < 1e-4 for step in metrics[:3]), "rollouts have the policy's weights"
    sequences, num_turns = recorded_responses(run, 2)
    assert len(sequences) == third["distill/num_responses"] == round(0.5 * num_turns) > 1
    one, two = (export(run, step) for step in (1, 2))
    merged = {name: (1 - ALPHA) * one[name].double() + ALPHA * two[name].double() for name in one}
    teacher, policy = (write_model(weights, random_model, tmp_path / name) for name, weights in (("merged", merged), ("policy", two)))
    check_responses(sequences, third, teacher=teacher, policy=policy)

    kill_when_there_is(killed / "checkpoints" / "step_00000002", begin(*given, f"run.dir={killed}"))
    assert "resume: " in end(begin(*given, f"run.dir={killed}"))
    for file in sorted(run.glob("final/*.safetensors")) + sorted(run.glob("rollouts/*.parquet")):
        assert content(killed / file.relative_to(run)) == content(file), file


@pytest.mark.long
def test_a_trimmed_merge_with_adapters_responds_on_two_processes(random_model: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """With LoRA, each of two engines has the weights with the largest fifth of the first step's
    changes, and the processes train on each other's responses."""
    given = ("algo=rloo", "lora.rank=4", "distill.merge.method=ties", "distill.apply_to=responses", "run.steps=2", "optim.lr=3e-2")
    run = tmp_path / "run"
    overrides = (*GAME_OVERRIDES, *SMALL, "batch.prompts_per_step=3", f"model.path={random_model}", *given)
    torchrun(2, RECORDED, *overrides, f"run.dir={run}")
    _, second, _ = read_metrics(run / "metrics.jsonl")
    sequences, num_turns = recorded_responses(run, 1)
    assert len(sequences) == second["distill/num_responses"] == num_turns
    policy = export(run, 1)
    teacher = write_model(trim(weights_of(random_model), policy), random_model, tmp_path / "merged")
    check_responses(sequences, second, teacher=teacher, policy=write_model(policy, random_model, tmp_path / "student"))


def recorded_responses(run: Path, step: int) -> tuple[list[TokenSequence], int]:
    """Return a step's responses, with the images of the recorded rollouts, and the number of turns.

    Each response follows the context of a turn, and a random model writes no action, so that all of
    its tokens have a loss.
    """
    rollouts = [each for each in read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet") if each.is_trained_on]
    turns = [(rollout.sequences[turn.sequence], turn.token_span[0]) for rollout in rollouts for turn in rollout.turns]
    contexts = {(*whole.token_ids[:start], *(image.key for image in whole.images)) for whole, start in turns}
    images = {image.key: image for rollout in rollouts for image in rollout.images}
    found = [each for rollout in pickle.loads((run / f"responses_{step}.pickle").read_bytes()) for each in rollout.sequences]
    for sequence in found:
        start = sequence.loss_mask.index(1)
        assert all(sequence.loss_mask[start:])
        assert (*sequence.token_ids[:start], *(image.key for image in sequence.images)) in contexts
        sequence.images = [images[image.key] for image in sequence.images]
    return found, len(turns)


def check_responses(sequences: list[TokenSequence], metrics: dict[str, float], *, teacher: Path, policy: Path) -> None:
    """Compare the engine's logprobs of responses with the teacher's, and the metric with the mean
    negative log-likelihood by the policy, both by Hugging Face's model."""
    by_teacher, by_policy = (hf_logprobs(model, sequences) for model in (teacher, policy))
    for sequence, logprobs in zip(sequences, by_teacher, strict=True):
        found = [logprob for logprob, sampled in zip(sequence.rollout_logprobs, sequence.loss_mask, strict=True) if sampled]
        assert found == pytest.approx(logprobs, abs=1e-4)
    flat = [logprob for each in by_policy for logprob in each]
    assert metrics["distill/response_nll"] == pytest.approx(-sum(flat) / len(flat), rel=1e-5)
    assert max(abs(a - b) for a, b in zip(flat, (logprob for each in by_teacher for logprob in each), strict=True)) > 1e-2
    assert metrics["rollout_mismatch/logprob_abs_diff_max"] < 1e-4, "rollouts have the policy's weights"
