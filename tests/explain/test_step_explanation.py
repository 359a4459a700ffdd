"""Explanation of a recorded step: a correct run has no findings, and each planted mistake is named
with its location."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image as pil
from safetensors.torch import load_file, save_file

from megatron_rl.cli.explain import main
from megatron_rl.config import ModelSettings
from megatron_rl.explain import replay_forward
from megatron_rl.explain.findings import TOLERANCES
from megatron_rl.explain.trainer_forward import TrainerForward
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Rollout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.explain_run_folder import STALE_TENSOR, EngineBehavior, engine_mistakes, read_stale_tensor, resize_twice, write_run
from tests.support.golden_rollouts import CASES, GOLDEN


@pytest.fixture(scope="module")
def older_tensor(older: Path) -> torch.Tensor:
    return read_stale_tensor(older)


def line_of(said: str, start: str) -> str:
    """Return the only line that starts with `start`."""
    found = [line.strip() for line in said.splitlines() if line.strip().startswith(start)]
    assert len(found) == 1, said
    return found[0]


def differing(said: str) -> set[str]:
    return {line.split("DIFFERS")[0].strip() for line in said.splitlines() if "DIFFERS" in line}


@pytest.mark.parametrize("as_lines", [False, True])
def test_nothing_is_found_where_nothing_is_wrong(as_lines: bool, random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A correct run has no findings, for both file formats of its rollouts."""
    run = write_run(tmp_path / "run", random_model, as_lines=as_lines)
    assert main([str(run), "--step", "0"]) == 0
    said = capsys.readouterr().out
    assert not differing(said) and said.splitlines()[-1] == "no differences found" and "2 rollouts, 2 sequences, 36 sampled tokens" in said
    assert line_of(said, "trainer, packed").split()[6] == "36" and len(said.splitlines()) < 50


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_vl_moe", "qwen3_5"))]
)
def test_another_family(family: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct run of another family has no findings, and a changed tensor of the last layer is
    located in the last layer."""
    make_checkpoint(tmp_path / "model", family=family, init="random", seed=1)
    run = write_run(tmp_path / "run", tmp_path / "model")
    assert main([str(run), "--step", "0"]) == 0
    assert not differing(capsys.readouterr().out)

    class Spoiled(TrainerForward):
        def __init__(self, *given: object, **named: object) -> None:
            super().__init__(*given, **named)
            with torch.no_grad():
                mlp = self.chunks[0].language.decoder.layers[-1].mlp
                (mlp.experts.linear_fc2 if family == "qwen3_vl_moe" else mlp.linear_fc2.weight).mul_(1.01)

    monkeypatch.setattr(replay_forward, "TrainerForward", Spoiled)
    assert main([str(run), "--step", "0"]) == 1
    assert "first difference in layer 3 mlp," in line_of(capsys.readouterr().out, "trainer, one process: first difference")


@pytest.fixture(scope="module")
def mistakes(random_model: Path, older: Path) -> dict[str, dict]:
    return engine_mistakes(Renderer(ModelSettings(path=str(random_model))), older)


@pytest.mark.parametrize("name", ["temperature 0.7", "replaced", "resized again", "rope sections", STALE_TENSOR])
def test_what_the_engine_did_is_named(
    name: str, mistakes: dict[str, dict], random_model: Path, older: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Each planted mistake of the engine is named, and nothing else differs."""
    expected, how = next(each for each in mistakes.items() if each[0].startswith(name))
    run = write_run(tmp_path / "run", random_model, **how)
    assert main([str(run), "--step", "0", "--older", str(older)]) == 1
    said = capsys.readouterr().out
    assert differing(said) == {"engine, recorded"}, said
    assert expected in line_of(said, "engine, recorded, rollout 0 sequence 0:"), said
    assert "differences found" in said


def test_of_two_pictures_the_second_is_found(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A mistake in the second image is named.

    Tokens before that image agree, so the first differing token is in the second response.
    """
    renderer = Renderer(ModelSettings(path=str(random_model)))

    def second(images: list[Image]) -> list[Image]:
        return [*images[:1], resize_twice(images[1], renderer, (56, 28))] if len(images) > 1 else images

    run = write_run(tmp_path / "run", random_model, behavior=EngineBehavior(transform_images=second))
    assert main([str(run), "--step", "0"]) == 1
    said = capsys.readouterr().out
    assert "sequence 0: image 1 (" in line_of(said, "engine, recorded, rollout 0"), said
    assert "engine, recorded, rollout 1" not in said


def test_a_mistake_that_is_nobodys_is_not_explained(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A random difference is reported without an explanation."""

    def noise(rollouts: list[Rollout]) -> None:
        context = rollouts[0].sequences[0]
        place = max(place for place, sampled in enumerate(context.loss_mask) if sampled)
        context.rollout_logprobs[place] -= 0.01

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=noise)
    assert main([str(run), "--step", "0"]) == 1
    assert "no hypothesis reproduces these logprobs" in line_of(capsys.readouterr().out, "engine, recorded, rollout 0")


def test_what_the_trainer_said_then(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Wrong recorded logprobs of the trainer are reported for the sequence that has them.

    The other sequence has none recorded.
    """

    def old(rollouts: list[Rollout]) -> None:
        context = rollouts[1].sequences[0]
        context.set_column("old_logprobs", [logprob - 0.02 * (logprob != 0.0) for logprob in context.rollout_logprobs])

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=old)
    assert main([str(run), "--step", "0"]) == 1
    said = capsys.readouterr().out
    assert differing(said) == {"trainer, recorded"} and "DIFFERS" in said, said
    count, mean = line_of(said, "trainer, recorded  ").split()[3:5]
    assert count == "12" and float(mean) == pytest.approx(0.02, rel=0.01)


def test_a_tensor_that_alone_did_not_move(random_model: Path, older: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A tensor that is the only one equal to the older weights is named.

    Since the weights themselves contain it, engine and trainer agree.
    """
    shutil.copytree(random_model, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    stored = load_file(path)
    name = next(name for name in stored if name.endswith("layers.1.self_attn.o_proj.weight"))
    save_file({**stored, name: load_file(older / "model.safetensors")[name]}, path, metadata={"format": "pt"})
    run = write_run(tmp_path / "run", tmp_path / "model")
    assert main([str(run), "--step", "0", "--older", str(older)]) == 1
    said = capsys.readouterr().out
    assert differing(said) == {"changed weights"}, said
    assert "model.layers.1.self_attn.o_proj.weight: equals the older weights, but 80 others have changed" in said, said


def spoiled(kind: str, tensor: torch.Tensor, picture: Callable[[Image], torch.Tensor]) -> type[TrainerForward]:
    """Return a trainer class with the given mistake."""

    class Spoiled(TrainerForward):
        def __init__(self, *given: object, **named: object) -> None:
            if kind == "temperature":
                named["temperature"] = 0.7
            if kind in ("swapped", "resized"):
                named["patches"] = picture
            super().__init__(*given, **named)
            if kind == "stale":
                with torch.no_grad():
                    dict(self.chunks[0].named_parameters())["language.decoder.layers.2.mlp.linear_fc2.weight"].copy_(tensor)
            if kind == "sections":
                self.chunks[0].config.mrope_section = [6, 4, 6]

    return Spoiled


TRAINERS = {
    "stale": ["layers", "first difference in layer 2 mlp,", STALE_TENSOR, "stale"],
    "sections": ["first difference in rotary angles,", "rope sections [6, 4, 6], not"],
    "temperature": ["temperature 0.7, not 0.9", "all layers agree"],
    "swapped": ["first difference in patches, rollout 0 sequence 0 image 0", "replaced by image 1"],
    "resized": ["first difference in patches, rollout 0 sequence 0 image 1", "resized again, to 56x28 and back"],
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_the_trainer_does_is_named(
    kind: str, random_model: Path, older: Path, older_tensor: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each planted mistake of the trainer is named, with the first layer or image that differs.

    The engine has no findings.
    """
    run = write_run(tmp_path / "run", random_model)
    renderer = Renderer(ModelSettings(path=str(random_model)))
    seen: dict[str, Image] = {}
    write_run(
        tmp_path / "other", random_model, corrupt_rollouts=lambda rollouts: seen.update({i.key: i for i in rollouts[0].sequences[0].images})
    )
    first, second = seen

    def swapped(image: Image) -> torch.Tensor:
        other = {first: second, second: first}.get(image.key, image.key)
        return seen[other].patch_PC if other in seen else renderer.patches(image, lambda each: each.pil)

    def twice(image: Image) -> torch.Tensor:
        return resize_twice(image, renderer, (56, 28)).patch_PC if image.key == second else renderer.patches(image, lambda each: each.pil)

    monkeypatch.setattr(replay_forward, "TrainerForward", spoiled(kind, older_tensor, swapped if kind == "swapped" else twice))
    assert main([str(run), "--step", "0", "--older", str(older)]) == 1
    said = capsys.readouterr().out
    assert "engine, recorded" not in differing(said) and "trainer, one process" in differing(said), said
    assert [part for part in TRAINERS[kind] if part not in said] == [], said


def test_pictures_whose_files_were_swapped_or_resized(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Swapped image files and a resized image file are named, and a sequence with such an image is
    not replayed."""
    run = write_run(tmp_path / "run", random_model)
    wide = sorted(path for path in (run / ROLLOUTS_FOLDER / "images").iterdir() if pil.open(path).size == (112, 56))
    contents = [path.read_bytes() for path in wide]
    for path, content in zip(wide, reversed(contents), strict=True):
        path.write_bytes(content)
    assert main([str(run), "--step", "0", "--no-model"]) == 1
    said = capsys.readouterr().out
    assert said.count("the images were swapped") == 2 and differing(said) == {"image pixels"}, said
    wide[0].write_bytes(contents[0])
    with pil.open(wide[1]) as image:
        image.resize((84, 56)).save(wide[1])
    assert main([str(run), "--step", "0"]) == 1
    said = capsys.readouterr().out
    assert f"image {wide[1].stem[:8]}: was resized again: it has 84x56 pixels, its grid requires 112x56" in said
    assert "rollout 0 sequence 0: not replayed" in said and "trainer, one process           ok            12" in said, said


SPOILS: dict[str, tuple[str, Callable]] = {
    "masks, spans, logprobs": ("the spans of the turns", lambda rollout: rollout.turns.pop()),
    "banned ids": ("was sampled", lambda rollout: rollout.sequences[0].token_ids.__setitem__(-1, 0)),
    "weight versions": ("has version 2, but step 0", lambda rollout: rollout.sequences[0].weight_versions.__setitem__(-1, 2)),
    "placeholders and grids": ("placeholders, but", lambda rollout: rollout.sequences[0].images.pop()),
}


@pytest.mark.parametrize("name", SPOILS)
def test_what_needs_no_model(name: str, random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Inconsistent records are reported without a model, with rollout, sequence and reason."""
    said_of_it, spoil = SPOILS[name]
    never = Renderer(ModelSettings(path=str(random_model))).banned_ids[0]

    def both(rollouts: list[Rollout]) -> None:
        spoil(rollouts[1])
        if name == "banned ids":
            rollouts[1].sequences[0].token_ids[-1] = never

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=both)
    assert main([str(run), "--step", "0", "--no-model"]) == 1
    said = capsys.readouterr().out
    assert name in differing(said) and "rollout 1 sequence 0" in said and said_of_it in said, said


def test_a_context_without_versions(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Sampled tokens without a weight version are reported under the masks, and the rest of the
    report is still printed."""

    def forgotten(rollouts: list[Rollout]) -> None:
        context = rollouts[1].sequences[0]
        context.weight_versions = [-1] * len(context.token_ids)

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=forgotten)
    assert main([str(run), "--step", "0", "--no-model"]) == 1
    said = capsys.readouterr().out
    assert (
        differing(said) == {"masks, spans, logprobs"} and "sampled according to the mask, but not according to weight_versions" in said
    ), said


def test_versions_never_go_back(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A weight version that decreases within a sequence is reported."""

    def stale(rollouts: list[Rollout]) -> None:
        context = rollouts[0].sequences[0]
        place = context.loss_mask.index(1)
        context.weight_versions[place] = 1

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=stale)
    assert main([str(run), "--step", "0", "--no-model"]) == 1
    assert "has version 0, after tokens of version 1" in capsys.readouterr().out


def test_what_cannot_be_read_is_skipped_and_said(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Unreadable lines, old records and broken images are skipped with a message, and the rest is
    examined."""
    run = write_run(tmp_path / "run", random_model, as_lines=True)
    path = run / ROLLOUTS_FOLDER / "step_000000.jsonl"
    good, other = path.read_text().splitlines()
    old = json.loads(other)
    old["rollout"]["version"] = 1
    path.write_text("\n".join(['{"step": 0, "rol', good, json.dumps(old), "[" * 100_000, good]) + "\n" + good[:50])
    (run / ROLLOUTS_FOLDER / "step_000000.parquet").write_bytes(b"half of a file")
    assert main([str(run), "--step", "0"]) == 0
    said = capsys.readouterr().out
    assert "2 rollouts, 2 sequences" in said and "rollout 2: rollout record: version" in said and "step_000000.parquet" in said, said
    next((run / ROLLOUTS_FOLDER / "images").iterdir()).unlink()
    for each in (run / ROLLOUTS_FOLDER / "images").iterdir():
        each.write_bytes(b"no picture")
    assert main([str(run), "--step", "0", "--no-model"]) == 0
    assert "checked without its images" in capsys.readouterr().out


def test_of_a_whole_step_the_rollout_without_its_picture_is_left_out(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A rollout whose image file is missing is examined without images and left out of the
    replay."""
    run = write_run(tmp_path / "run", random_model)
    (tall,) = (path for path in (run / ROLLOUTS_FOLDER / "images").iterdir() if pil.open(path).size == (56, 140))
    tall.unlink()
    assert main([str(run), "--step", "0"]) == 0
    said = capsys.readouterr().out
    assert "2 rollouts" in said and "rollout 1: " in said and "checked without its images" in said, said
    assert line_of(said, "trainer, packed").split()[6] == "24" and line_of(said, "image pixels").split()[-2] == "2"


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda run: (run / "config.yaml").write_text("model: [1"), "config.yaml: cannot be read"),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml: cannot be read"),
        (lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("model:", "mode:", 1)), "config.yaml"),
        (lambda run: next((run / ROLLOUTS_FOLDER).glob("*.parquet")).write_bytes(b"PAR1"), "no rollout of step 0 can be read"),
        (lambda run: next((run / ROLLOUTS_FOLDER).glob("*.parquet")).unlink(), "no rollout of step 0 can be read"),
    ],
)
def test_nothing_to_look_at_is_one_line(
    spoil: Callable[[Path], None], line: str, random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run without readable settings or rollouts ends with a one-line error."""
    run = write_run(tmp_path / "run", random_model)
    spoil(run)
    capsys.readouterr()
    assert main([str(run), "--step", "0"]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1 and said.err.startswith("error: ") and line in said.err, said.err


def test_bounds_of_either_precision() -> None:
    """Tolerances accept and reject differences computed by hand.

    Of 200 values, the 99th percentile lies at position 198 of 199 steps, between the third and the
    second largest.
    """
    fine, coarse = TOLERANCES["float32"], TOLERANCES["bfloat16"]
    assert fine.is_within([]) and fine.is_within([1e-4, 0.0]) and not fine.is_within([1.1e-4, 0.0]) and not fine.is_within([float("nan")])
    assert coarse.is_within([0.02] * 199 + [3.0]) and not coarse.is_within([0.02] * 196 + [0.6] * 4) and not coarse.is_within([0.06] * 200)


def test_weights_that_were_not_kept(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """If the checkpoint of the step was deleted, the error names it. --weights takes its place."""

    def later(rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            rollout.sequences[0].weight_versions = [2 if version == 0 else version for version in rollout.sequences[0].weight_versions]

    run = write_run(tmp_path / "run", random_model, corrupt_rollouts=later)
    for path in (run / ROLLOUTS_FOLDER).glob("step_*"):
        path.rename(path.with_name(path.name.replace("000000", "000002")))
    assert main([str(run), "--step", "2"]) == 2
    assert "step_00000002 does not exist" in capsys.readouterr().err
    assert main([str(run), "--step", "2", "--weights", str(random_model)]) == 0
    assert "weights of version 2" in capsys.readouterr().out


def golden_run(run: Path, model: Path, *, temperature: float) -> Path:
    """Write a run directory from rollouts that vLLM once sampled."""
    shutil.copytree(GOLDEN / "images", run / ROLLOUTS_FOLDER / "images")
    shutil.copy(GOLDEN / "rollouts.jsonl", run / ROLLOUTS_FOLDER / "step_000000.jsonl")
    settings = asdict(CASES["grpo"].settings(model))
    settings["algo"]["temperature"] = temperature
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_what_a_real_engine_sampled(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Rollouts of a real vLLM engine have no findings, and a wrong temperature in the settings is
    named."""
    assert main([str(golden_run(tmp_path / "right", random_model, temperature=1.0)), "--step", "0", "--rollouts", "12"]) == 0
    said = capsys.readouterr().out
    assert not differing(said) and "12 rollouts" in said, said
    assert main([str(golden_run(tmp_path / "wrong", random_model, temperature=1.25)), "--step", "0", "--rollouts", "12"]) == 1
    assert "temperature 1, not 1.25" in capsys.readouterr().out


def test_an_engine_that_is_asked_again(random_model: Path, older: Path, tmp_path: Path) -> None:
    """The engine is loaded with the given weights and agrees with Hugging Face; the recorded
    logprobs are reported as those of other weights."""
    run = golden_run(tmp_path / "run", random_model, temperature=1.0)
    given = (run, "--step", "0", "--rollouts", "2", "--engine", "--weights", older, "--older", random_model)
    result = fork_server.run_script(ROOT / "launch" / "explain.py", *given, timeout_s=240)
    assert result.returncode == 1 and differing(result.stdout) == {"engine, recorded"}, result.stdout
    assert "engine, live                   ok" in result.stdout, result.stdout
    assert "all weights equal the older weights" in result.stdout, result.stdout


def test_an_evaluation_is_played_by_one_set_of_weights(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An evaluation is checked against one set of weights.

    It samples greedily, with logprobs at temperature 1. The run in the same directory has another
    temperature and newer weights.
    """
    run = write_run(tmp_path / "run", random_model, behavior=EngineBehavior(temperature=1.0))
    recorded = run / ROLLOUTS_FOLDER / "step_000000.parquet"
    recorded.rename(recorded.with_name("step_000002.parquet"))
    assert main([str(run), "--step", "2"]) == 1
    said = capsys.readouterr().out
    assert "has version 0, older than run.max_staleness=0 allows" in said and "temperature 1, not 0.9" in said
    (run / "evaluation.json").write_text("{}")
    assert main([str(run), "--step", "2"]) == 0
    assert not differing(capsys.readouterr().out)


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")])
def test_at_a_layout(layout: tuple[str, str], random_model: Path, tmp_path: Path) -> None:
    """With tp 2 or pp 2, a correct run has no findings, and a fault on one rank is located by layer
    and tensor."""
    run = write_run(tmp_path / "run", random_model)
    name = "trainer, tp 2 x pp 1" if layout[0] == "--tp" else "trainer, tp 1 x pp 2"
    result = fork_server.run_world(2, ROOT / "launch" / "explain.py", run, "--step", "0", *layout, timeout_s=120)
    assert result.returncode == 0, result.stdout
    assert " ok " in line_of(result.stdout, name)
    result = fork_server.run_world(2, SUPPORT / "explain_faulty_rank.py", run, "--step", "0", *layout, timeout_s=120)
    assert result.returncode == 1 and f"{name}: first difference in layer 3 attention," in result.stdout, result.stdout
    assert len(differing(result.stdout)) == 2 and all(
        each.startswith(("trainer, tp", "weights at tp")) for each in differing(result.stdout)
    )
    assert "model.layers.3.self_attn.o_proj.weight: differs from the weights" in result.stdout
