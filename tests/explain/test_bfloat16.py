"""Explanation of runs in bfloat16, whose logprobs are rounded: Hugging Face's bfloat16 model stands
in for engine and trainer.

Mistakes larger than the rounding are named as in float32. Smaller mistakes are not found, and
nothing else is reported in their place.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.cli.explain import main
from megatron_rl.config import ModelSettings
from megatron_rl.explain.findings import TOLERANCES
from megatron_rl.explain.hf_reference import HfReferenceModel
from megatron_rl.explain.hypotheses import HypothesisInputs, MismatchCase, find_explanation, fit_temperature
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import make_patch_fn
from megatron_rl.models.hf_config import read_spec
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Rollout
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.explain_run_folder import (
    STALE_TENSOR,
    TEMPERATURE,
    EngineBehavior,
    engine_mistakes,
    make_rollouts,
    nested_name,
    set_engine_logprobs,
    write_run,
)

NAMED = {
    "temperature": r"temperature 0\.(69\d*|7(0\d*)?), not 0\.9",
    "replaced": r"image 0 \(\w+\): replaced by image 1 \(\w+\), and vice versa",
    "resized again": r"resized again, to (56x28|28x70) and back",
    STALE_TENSOR: f"{re.escape(STALE_TENSOR)} is stale: it equals the older weights",
}
"""Start of the mistake's name in float32 -> pattern of the explanation in bfloat16."""
WITHIN = "rope sections"
NEAR = "model.layers.1.self_attn.k_proj.bias"
"""Tensor of the nano model with seed 2. If it is stale, logprobs change by 0.06 in the mean. A
fitted temperature reduces the difference to 0.05, and the right tensor to 0.02."""


@pytest.fixture(scope="module")
def mistakes(random_model: Path, older: Path) -> dict[str, dict]:
    return engine_mistakes(Renderer(ModelSettings(path=str(random_model))), older)


def trainer_said_so(rollouts: list[Rollout]) -> None:
    """Record the engine's logprobs as the trainer's, so that both have the mistake."""
    for rollout in rollouts:
        rollout.sequences[0].set_column("old_logprobs", list(rollout.sequences[0].rollout_logprobs))


def explained(said: str, who: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in said.splitlines() if line.strip().startswith(f"{who}, recorded, rollout")]


@pytest.mark.parametrize("name", NAMED)
def test_what_rounded_numbers_tell_is_named(
    name: str, mistakes: dict[str, dict], random_model: Path, older: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The mistake is named for every sequence that differs, for the engine and the trainer."""
    how = next(how for expected, how in mistakes.items() if expected.startswith(name))
    run = write_run(tmp_path / "run", random_model, dtype="bfloat16", corrupt_rollouts=trainer_said_so, **how)
    assert main([str(run), "--step", "0", "--older", str(older)]) == 1
    said = capsys.readouterr().out
    for who in ("engine", "trainer"):
        lines = explained(said, who)
        assert lines and all(re.fullmatch(f"(image \\d .*: )?{NAMED[name]}", line) for line in lines), said


@pytest.mark.parametrize("name", ["nothing", WITHIN])
def test_what_is_within_the_rounding_is_not_found(
    name: str, mistakes: dict[str, dict], random_model: Path, older: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Swapped rope sections of the nano model change logprobs by less than rounding and are not
    reported."""
    how = next((how for expected, how in mistakes.items() if expected.startswith(name)), {})
    run = write_run(tmp_path / "run", random_model, dtype="bfloat16", **how)
    assert main([str(run), "--step", "0", "--older", str(older)]) == 0
    said = capsys.readouterr().out
    mean = float(next(line for line in said.splitlines() if "engine, recorded" in line).split()[4])
    assert 0.01 < mean < 0.05 and said.splitlines()[-1] == "no differences found", said


@pytest.mark.parametrize("planted", ["", NEAR])
def test_of_those_that_hold_the_best_is_named(planted: str, older: Path, tmp_path: Path) -> None:
    """If several hypotheses are within tolerance, the best one is named.

    A fitted temperature is within tolerance in both cases and is tried first, and so is the
    hypothesis that nothing is wrong.
    """
    make_checkpoint(tmp_path / "model", preset="nano", init="random", seed=2)
    spec, renderer = read_spec(str(tmp_path / "model")), Renderer(ModelSettings(path=str(tmp_path / "model")))
    source, others = (open_source(path, spec, key="model") for path in (tmp_path / "model", older))
    hf = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    if planted:
        with torch.no_grad():
            dict(hf.named_parameters())[nested_name(planted)].copy_(others.read(planted))
    context = make_rollouts(renderer)[0].sequences[0]
    set_engine_logprobs(hf, renderer, context, EngineBehavior())
    looked = RecordedSequence(0, 0, context)
    reference = HfReferenceModel(
        spec, source, banned_ids=renderer.banned_ids, patches=make_patch_fn(renderer), device=torch.device("cpu"), cache_bytes=1 << 30
    )  # fmt: skip
    case = MismatchCase(
        sequence=looked, observed_R=torch.tensor(looked.recorded_logprobs, dtype=torch.float64), mask_R=torch.ones(24, dtype=torch.bool),
        temperature=TEMPERATURE, tolerance=replace(TOLERANCES["bfloat16"], mean=0.1),
    )  # fmt: skip
    logits_RV = reference.compute_logits(looked)
    for temperature in (TEMPERATURE, fit_temperature(case, reference, logits_RV)):
        assert case.tolerance.is_within(case.abs_diffs(reference.compute_logprobs(looked, logits_RV, temperature=temperature)))
    named = find_explanation(case, HypothesisInputs(reference=reference, renderer=renderer, images={}, older_source=others))
    assert named == (f"{planted} is stale: it equals the older weights" if planted else "")
