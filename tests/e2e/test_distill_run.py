"""Runs that learn from a teacher: recorded numbers against Hugging Face's model of the teacher."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.config import ModelSettings
from megatron_rl.data.transcripts import load_demonstrations
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.registry import build_task
from megatron_rl.rollout.episode import derive_seed
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from megatron_rl_tools.convert import verify
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.contracts.test_configs import settings_of
from tests.support.data_files import make_png, write_rows
from tests.support.game_runs import GAME_OVERRIDES

SMALL = ("batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=0", "optim.lr=1e-3")
TRAIN = "launch/train.py"
COEF = 0.5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a teacher with another number of layers than the policy."""
    folder = tmp_path_factory.mktemp("teacher") / "random"
    make_checkpoint(folder, init="random", seed=7, layers=6)
    return folder


def hf_logprobs(teacher: Path, sequences: list[TokenSequence]) -> list[list[float]]:
    """Return the teacher's logprobs of the sampled tokens at temperature 1, without banned ids."""
    renderer = Renderer(ModelSettings(path=str(teacher), min_pixels=12000, max_pixels=13000))
    model, found = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32), []
    for sequence in sequences:
        logp = banned_to_zero(model, with_patches(sequence, renderer), renderer)
        found.append([logp[t - 1, sequence.token_ids[t]].item() for t, sampled in enumerate(sequence.loss_mask) if sampled])
    return found


def with_patches(sequence: TokenSequence, renderer: Renderer) -> TokenSequence:
    """Return a recorded sequence after adding its images' patches."""
    sequence.images = [
        renderer.prompt([{"role": "user", "content": [{"type": "image", "image": image.pil}]}]).images[0] for image in sequence.images
    ]
    return sequence


def test_the_teacher_rewards_each_token(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """Recorded logprobs of the teacher equal Hugging Face's to 1e-4, and each token's advantage is
    that of its episode plus coef * (teacher logprob - old logprob)."""
    given = ("distill.apply_to=reward", f"distill.coef={COEF}", f"distill.teacher={teacher}", "rollouts.save=all", "run.steps=1")
    torchrun(1, TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *GAME_OVERRIDES, *SMALL, "algo=rloo", *given)
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    assert len(rollouts) == 4
    rewards = {group: [r.reward for r in rollouts if r.group == group] for group in {r.group for r in rollouts}}
    for rollout in rollouts:
        one, two = rewards[rollout.group]
        own = rollout.reward - (one + two - rollout.reward)  # RLOO with two rollouts: the difference from the other
        expected = hf_logprobs(teacher, rollout.sequences)
        for sequence, teacher_logprobs in zip(rollout.sequences, expected, strict=True):
            places = [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
            assert [sequence.teacher_logprobs[place] for place in places] == pytest.approx(teacher_logprobs, abs=1e-4)
            shaped = [own + COEF * (logp - sequence.old_logprobs[place]) for place, logp in zip(places, teacher_logprobs, strict=True)]
            assert [sequence.advantages[place] for place in places] == pytest.approx(shaped, abs=1e-4)
    sampled = [(s.old_logprobs[t], s.teacher_logprobs[t]) for s in sequences for t, mask in enumerate(s.loss_mask) if mask]
    (step, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert step["distill/reverse_kl"] == pytest.approx(sum(old - logp for old, logp in sampled) / len(sampled), abs=1e-5)


def test_the_teacher_alone_is_a_loss(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """With algo=distill the loss is the mean divergence of the sampled tokens times the
    coefficient, also with the weights of the step after; no line says that nothing was learned."""
    given = ("algo=distill", f"distill.teacher={teacher}", "distill.final_coef=0.5", "distill.decay_steps=1", "distill.support=top_k")
    overrides = (f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *GAME_OVERRIDES, *SMALL, *given, "run.steps=2")
    output = torchrun(2, TRAIN, *overrides)
    first, second, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["distill/divergence"] > 0.1
    assert [first["loss"], second["loss"]] == pytest.approx([first["distill/divergence"], 0.5 * second["distill/divergence"]], rel=1e-5)
    assert second["distill/divergence"] < first["distill/divergence"]
    assert "nothing learned" not in output and "nothing was learned" not in output


def test_adapters_a_critic_and_stale_episodes(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """With LoRA, PPO and episodes that go on during updates, the first step's divergence is that of
    Hugging Face's base model on the recorded tokens: new adapters change nothing. The teacher's
    weights are not the base's, and the adapters learn from it."""
    given = ("algo=ppo", "lora.rank=4", "run.max_staleness=1", f"distill.teacher={teacher}", "rollouts.save=all", "run.steps=2")
    torchrun(2, TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *GAME_OVERRIDES, *SMALL, *given)
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=12000, max_pixels=13000))
    sequences = [with_patches(sequence, renderer) for rollout in rollouts for sequence in rollout.sequences]
    *_, reverse = compare_on(sequences, random_model, teacher, renderer)
    first, second, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["distill/divergence"] == pytest.approx(reverse, rel=1e-4)
    assert second["distill/divergence"] < first["distill/divergence"]


def test_the_teacher_adds_to_the_warm_start(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """The first step's metrics equal the means over the demonstrations' tokens of Hugging Face's
    negative log-likelihood and KL(teacher || policy), and the loss is their weighted sum; with
    algo=distill, the loss is the divergence alone."""
    given = ("distill.divergence=forward_kl", f"distill.coef={COEF}", f"distill.teacher={teacher}", *GAME_OVERRIDES)
    small = ("stage=sft", f"model.path={random_model}", "sft.steps=[2]", "sft.num_demonstrations=3", "sft.batch_size=3", "optim.lr=1e-3")
    settings = settings_of(*small, *given, "sft.splits=[correct]", f"run.dir={tmp_path}")
    renderer = Renderer(settings.model)
    shown = build_task(settings.task).demonstrations("correct", num=3, seed=derive_seed(settings.run.seed, 0))
    nll, divergence, _ = compare_on([renderer.transcript(each.messages) for each in shown], random_model, teacher, renderer)
    for name, algorithm in (("both", "grpo"), ("alone", "distill")):
        torchrun(2, TRAIN, *small, *given, "sft.splits=[correct]", f"algo={algorithm}", f"run.dir={tmp_path / name}")
        first, second, *_ = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [first["sft/nll"], first["distill/divergence"]] == pytest.approx([nll, divergence], rel=1e-5)
        assert first["loss"] == pytest.approx((nll if name == "both" else 0.0) + COEF * divergence, rel=1e-5)
        assert second["distill/divergence"] < first["distill/divergence"]


def test_demonstrations_among_rollouts(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """With a third of the samples from transcripts with images, the first step's divergences equal
    those of Hugging Face's models on the recorded rollouts and on the rendered transcripts, and the
    loss is their mean over all tokens."""
    overrides = mixed_overrides(random_model, teacher, tmp_path)
    torchrun(2, TRAIN, *overrides, "run.steps=1", f"run.dir={tmp_path / 'run'}")
    first, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=12000, max_pixels=13000))
    settings = settings_of(*overrides, "run.dir=x")
    drawn = load_demonstrations(settings.task.data, "transcripts", num=4, seed=derive_seed(settings.run.seed, 0))
    kinds = [[with_patches(s, renderer) for each in rollouts for s in each.sequences]]
    kinds.append([renderer.transcript(drawn[number].messages) for number in range(2)])
    means = [compare_on(sequences, random_model, teacher, renderer)[1] for sequences in kinds]
    counts = [sum(sum(sequence.loss_mask) for sequence in sequences) for sequences in kinds]
    assert [first["distill/divergence"], first["distill/data_divergence"]] == pytest.approx(means, rel=1e-4)
    assert first["tokens"] == counts[0] and "distill/data_tokens" not in first
    assert first["loss"] == pytest.approx(sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts), rel=1e-4)
    assert first["rollout_mismatch/logprob_abs_diff_max"] < 0.01, "demonstrations have no logprobs of an engine"


@pytest.mark.long
def test_a_resumed_run_goes_on_at_the_same_demonstration(torchrun, random_model: Path, teacher: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """The second step reports the numbers of a run that was not interrupted, bit for bit."""
    overrides = mixed_overrides(random_model, teacher, tmp_path)
    for name, steps in (("run", 2), ("resumed", 1), ("resumed", 2)):
        torchrun(2, TRAIN, *overrides, f"run.steps={steps}", f"run.dir={tmp_path / name}")
    _, one, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    two = next(line for line in read_metrics(tmp_path / "resumed" / "metrics.jsonl") if line["step"] == one["step"])
    for name in ("loss", "distill/data_divergence", "distill/divergence", "grad_norm"):
        assert one[name] == two[name], name


def mixed_overrides(student: Path, teacher: Path, folder: Path) -> tuple[str, ...]:
    """Return the settings of a run with two demonstrations for four rollouts."""
    (folder / "red.png").write_bytes(make_png("red"))
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * (n % 2) + f"Number {n}?"},
                {"role": "assistant", "content": "One " * (n + 1)},
            ]
        }
        | ({"images": ["red.png"]} if n % 2 else {})
        for n in range(3)
    ]
    path = write_rows(folder / "rows.jsonl", rows)
    given = (
        "algo=distill",
        "distill.divergence=forward_kl",
        f"distill.teacher={teacher}",
        "distill.data_fraction=0.34",
        "rollouts.save=all",
    )
    data = (f"task.data.demonstrations=[{path}]", f"task.data.images={folder}", f"model.path={student}", "checkpoint.every=1")
    return (*GAME_OVERRIDES, *SMALL, *given, *data)


def banned_to_zero(model: torch.nn.Module, sequence: TokenSequence, renderer: Renderer) -> torch.Tensor:
    """Return log-probabilities [T, V] in which the ids that are never sampled have probability
    0."""
    with torch.no_grad():
        logits = verify.compute_logits(model, sequence, image_token_id=renderer.image_token_id).double()
    logits[:, renderer.banned_ids] = float("-inf")
    return logits.log_softmax(-1)


def compare_on(sequences: list[TokenSequence], student: Path, teacher: Path, renderer: Renderer) -> tuple[float, float, float]:
    """Return the means over trained tokens of the student's negative log-likelihood, of
    KL(teacher || student) and of KL(student || teacher), by Hugging Face's models."""
    models = [AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    nll, forward, reverse = [], [], []
    for sequence in sequences:
        log_p, log_q = (banned_to_zero(model, sequence, renderer) for model in models)
        for t in (t for t, trained in enumerate(sequence.loss_mask) if trained):
            nll.append(-log_p[t - 1, sequence.token_ids[t]].item())
            p, q = (x[t - 1][log_p[t - 1].isfinite()] for x in (log_p, log_q))
            forward.append((q.exp() * (q - p)).sum().item())
            reverse.append((p.exp() * (p - q)).sum().item())
    return tuple(sum(each) / len(each) for each in (nll, forward, reverse))


def test_a_teacher_with_another_tokenizer_is_refused(random_model: Path, tmp_path: Path) -> None:
    from megatron_rl.models.vocabulary import check_same_tokens

    other = tmp_path / "other"
    make_checkpoint(other, init="random", vocab=900)
    with pytest.raises(ValueError, match=r"^distill.teacher=.*: its tokenizer differs from that of .* in \d+ tokens; .* has the id"):
        check_same_tokens(other, random_model, key="distill.teacher")
    check_same_tokens(random_model, random_model, key="distill.teacher")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no readable tokenizer"):
        check_same_tokens(tmp_path / "empty", random_model, key="distill.teacher")
