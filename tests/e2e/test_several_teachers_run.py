"""A run with two teachers chosen by data source, against Hugging Face's models of them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.config import DistillSettings, ModelSettings, TeacherServerSettings
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.preflight.settings import check_privileged_prompt, check_settings, check_teacher_sources
from megatron_rl.registry import build_task
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.contracts.test_configs import settings_of
from tests.e2e.test_distill_run import COEF, TRAIN, banned_to_zero, hf_logprobs
from tests.support.data_files import write_rows

SOURCES = ("sums", "colors", "games")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run on questions of three data sources, of which two have a teacher."""
    folder = tmp_path_factory.mktemp("teachers")
    for number, layers in enumerate((6, 4)):
        make_checkpoint(folder / SOURCES[number], init="random", seed=7 + number, layers=layers)
    rows = [{"question": f"What is {source}?", "answer": "4", "data_source": source} for source in SOURCES]
    path = write_rows(folder / "rows.jsonl", rows)
    teachers = ", ".join(f"{source}: {folder / source}" for source in SOURCES[:2])
    return [
        "task=vqa", f"task.data.train=[{path}]", f"task.data.eval=[{path}]", "task.eval_samples=0", "task.max_new_tokens=6",
        f"+distill.teachers={{{teachers}}}", "model.min_pixels=12000", "model.max_pixels=13000",
    ]  # fmt: skip


def test_each_source_has_its_own_teacher(torchrun, random_model: Path, overrides: list[str], tmp_path: Path) -> None:  # noqa: ANN001
    """Recorded logprobs of the two teachers equal those of their Hugging Face models to 1e-4, and
    change the advantages; the third source has no teacher and the advantages of RLOO."""
    given = ("algo=rloo", "distill.apply_to=reward", f"distill.coef={COEF}", "rollouts.save=all", "run.steps=1", "engine.kv_cache_mib=16")
    small = ("batch.prompts_per_step=3", "batch.group_size=2", "optim.lr=1e-3")
    torchrun(2, TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *overrides, *given, *small)
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    teachers, found, differences = settings_of(*overrides, "run.dir=x", "model.path=x").distill.teachers, set(), []
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        (other,) = (each.reward for each in rollouts if each.group == rollout.group and each is not rollout)
        places = [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
        expected = [rollout.reward - other] * len(places)
        if rollout.source in teachers:
            (logprobs,) = hf_logprobs(Path(teachers[rollout.source]), [sequence])
            assert [sequence.teacher_logprobs[place] for place in places] == pytest.approx(logprobs, abs=1e-4)
            gains = [logp - sequence.old_logprobs[place] for place, logp in zip(places, logprobs, strict=True)]
            expected = [value + COEF * gain for value, gain in zip(expected, gains, strict=True)]
            differences += [-gain for gain in gains]
        else:
            assert sequence.teacher_logprobs == []
            differences += [0.0] * len(places)
        assert [sequence.advantages[place] for place in places] == pytest.approx(expected, abs=1e-4)
        found.add(rollout.source)
    assert found == set(SOURCES)
    step, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert step["distill/reverse_kl"] == pytest.approx(sum(differences) / len(differences), abs=1e-5)


PROMPT = "<|im_end|> The answer to {question} is {answer}."


def test_the_policy_teaches_itself(torchrun, random_model: Path, overrides: list[str], tmp_path: Path) -> None:  # noqa: ANN001
    """The loss is the mean over sampled tokens of KL(teacher || policy), where the teacher is the
    policy after a prompt with the answer, by Hugging Face's model. A special token in the text is
    ordinary text."""
    given = ("algo=distill", "distill.divergence=forward_kl", f'distill.privileged_prompt="{PROMPT}"', "rollouts.save=all", "run.steps=1")
    plain = [each for each in overrides if "distill" not in each]
    small = ("batch.prompts_per_step=3", "batch.group_size=2", "optim.lr=1e-3", "engine.kv_cache_mib=16")
    torchrun(2, TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *plain, *given, *small)
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=12000, max_pixels=13000))
    model, found = AutoModelForImageTextToText.from_pretrained(random_model, dtype=torch.float32), []
    for rollout in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet"):
        (sequence,) = rollout.sequences
        text = f"<|im_end|> The answer to {rollout.question} is 4."
        ids = renderer.tokenizer.encode(text, split_special_tokens=True)
        assert renderer.end_id not in ids and renderer.tokenizer.decode(ids) == text
        end = max(place for place in range(sequence.loss_mask.index(1)) if sequence.token_ids[place] == renderer.end_id)
        read = TokenSequence([*sequence.token_ids[:end], *ids, *sequence.token_ids[end:]])
        log_p, log_q = (banned_to_zero(model, each, renderer) for each in (sequence, read))
        for place in (place for place, sampled in enumerate(sequence.loss_mask) if sampled):
            p, q = log_p[place - 1], log_q[place - 1 + len(ids)]
            found.append((q.exp() * (q - p))[p.isfinite()].sum().item())
    step, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert step["distill/divergence"] == pytest.approx(sum(found) / len(found), rel=1e-4, abs=1e-6)
    assert step["distill/divergence"] > 1e-4
    assert step["loss"] == pytest.approx(step["distill/divergence"], rel=1e-6)


def test_a_privileged_prompt_that_does_not_fit(overrides: list[str]) -> None:
    """A field that the examples lack is refused; a teacher on servers is not the policy itself."""
    plain = [*(each for each in overrides if "distill" not in each), "run.dir=x", "model.path=x"]
    settings = settings_of(*plain, 'distill.privileged_prompt="Hint: {solution}"')
    assert settings.distill.is_self and settings.distill.is_local and settings.distill.teacher_paths == []
    with pytest.raises(ValueError, match=r"^distill.privileged_prompt=Hint: {solution}: names a field that example train/0 .* lacks"):
        check_privileged_prompt(build_task(settings.task), settings)
    check_privileged_prompt(build_task(settings.task), settings_of(*plain, 'distill.privileged_prompt="{answer}"'))
    on_servers = DistillSettings(privileged_prompt="x", server=TeacherServerSettings(urls=["http://one:8000"]), support="top_k")
    assert not on_servers.is_self and not on_servers.is_local


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["distill.teachers.sum=there"], "distill.teachers=sum: is no data source of the training data, which has colors, games, sums"),
        (["algo=distill"], "data_source=games: has no teacher, and algo.name=distill learns from a teacher alone"),
    ],
)
def test_sources_that_do_not_fit(given: list[str], error: str, overrides: list[str]) -> None:
    settings = settings_of(*overrides, "run.dir=x", "model.path=x", *(f"+{each}" if "teachers" in each else each for each in given))
    with pytest.raises(ValueError, match=f"^{error}"):
        check_teacher_sources(build_task(settings.task), settings)
    check_teacher_sources(build_task(settings.task), settings_of(*overrides, "run.dir=x", "model.path=x"))


def test_a_teacher_that_does_not_fit(random_model: Path, overrides: list[str], tmp_path: Path) -> None:
    """A missing folder and another vocabulary are named by their key."""
    make_checkpoint(tmp_path / "other", init="random", vocab=900)
    plain = (*overrides, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}")
    check_settings(settings_of(*plain), 1)
    for path, error in (("nowhere", "distill.teachers.games=.*nowhere"), ("other", "distill.teachers.games=.*: has image_token_id")):
        with pytest.raises(ValueError, match=f"^{error}"):
            check_settings(settings_of(*plain, f"+distill.teachers.games={tmp_path / path}"), 1)
    with pytest.raises(ValueError, match=r"^distill.teachers=.*: are chosen by the data source of prompts"):
        check_settings(settings_of(*plain, "stage=sft"), 1)
