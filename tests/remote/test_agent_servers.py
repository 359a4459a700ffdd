"""Runs of task=agent on inference servers, with stale rollouts, with tensor parallelism and from
recorded rollouts. tests/e2e/test_agent_run.py is the part for every commit.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.config import ModelSettings
from megatron_rl.io.jsonl import read_lines
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Rollout, TokenSequence
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.agent_runs import (
    NUM_EPISODES,
    NUM_STEPS,
    agent_overrides,
    check_equal_runs,
    check_logprobs,
    kill_with_agents,
    train,
    weights_of,
    write_questions,
)
from tests.support.comparable_metrics import drop_timings
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, policy_logits
from tests.support.vllm_servers import serve_engines, write_token_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PIXEL_LIMITS = {"min_pixels": 3136, "max_pixels": 4000}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def servers(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Start two servers and return the settings of a run that uses them."""
    folder = tmp_path_factory.mktemp("servers")
    with serve_engines(random_model, folder, num_servers=2, pixel_limits=PIXEL_LIMITS) as urls:
        token_file = write_token_file(folder)
        yield ("engine.mode=server", "engine.health_timeout_s=60", f"engine.urls=[{','.join(urls)}]", f"engine.token_file={token_file}")


@pytest.fixture(scope="module")
def colocated(random_model: Path, questions: Path) -> Path:
    """Train on one rank with a colocated engine."""
    folder = questions.parent / "colocated"
    train(1, *agent_overrides(questions, random_model, folder))
    return folder


def test_two_ranks_on_servers_equal_one_with_a_colocated_engine(
    colocated: Path, servers: tuple[str, ...], random_model: Path, questions: Path, tmp_path: Path
) -> None:
    """Engine and trainer logprobs agree on every sampled token of every branch."""
    train(2, *agent_overrides(questions, random_model, tmp_path / "run"), *servers)
    check_logprobs(tmp_path / "run")
    check_equal_runs(tmp_path / "run", colocated)


def test_an_engine_on_two_ranks(colocated: Path, random_model: Path, questions: Path, tmp_path: Path) -> None:
    """The agents of an engine with tensor parallelism talk to its first rank."""
    train(2, *agent_overrides(questions, random_model, tmp_path / "run"), "engine.tp=2", "parallel.tp=2")
    check_logprobs(tmp_path / "run")
    check_equal_runs(tmp_path / "run", colocated)


def test_recorded_steps_are_trained_on_again(colocated: Path, random_model: Path, questions: Path, tmp_path: Path) -> None:
    """Training on the recorded rollouts, without agents, gives every metric and weight again."""
    replayed = ("run.mode=replay", f"rollouts.replay_from={colocated / 'rollouts'}")
    train(1, *agent_overrides(questions, random_model, tmp_path / "run"), *replayed)
    lines = [[drop_timings(line) for line in read_metrics(run / "metrics.jsonl")[:NUM_STEPS]] for run in (tmp_path / "run", colocated)]
    for ours, theirs in zip(*lines, strict=True):
        names = {name for name in theirs if name.startswith(("policy/", "reward/", "loss", "grad_norm"))}
        assert {"loss", "grad_norm", "reward/mean"} < names
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    weights, expected = weights_of(tmp_path / "run" / "final"), weights_of(colocated / "final")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


STALE = ("run.max_staleness=1", "optim.lr=3e-3", "checkpoint.every=1", "checkpoint.keep_last=9", "checkpoint.background=false")


@pytest.mark.parametrize("mode", ["server", "colocated"])
def test_every_token_has_the_version_that_sampled_it(
    mode: str, servers: tuple[str, ...], random_model: Path, questions: Path, tmp_path: Path
) -> None:
    """With run.max_staleness=1, an episode may span an update. The oracle is Hugging Face's model
    with the weights of every checkpoint: those of a token's version give its recorded logprob, and
    those of other versions do not.
    """
    folder = tmp_path / "run"
    overrides = agent_overrides(questions, random_model, folder, folder / "metrics.jsonl")
    train(1, *overrides, *STALE, *(servers if mode == "server" else ()))
    renderer = Renderer(ModelSettings(path=str(random_model), **PIXEL_LIMITS))
    models = [
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32) for path in versions_of(folder, random_model, tmp_path)
    ]
    spans = 0
    for step in range(NUM_STEPS):
        rollouts = list(read_rollouts(step_path(folder / "rollouts", step), with_images=True))
        assert len(rollouts) == NUM_EPISODES
        for rollout in rollouts:
            versions = check_versions(rollout, models, renderer=renderer)
            assert versions <= {step - 1, step} & {*range(NUM_STEPS)}
            spans += len(versions) == 2
    assert spans > 0, "nothing to tell apart"
    assert max(line["rollout/staleness_max"] for line in read_metrics(folder / "metrics.jsonl")[:-1]) == 1


def versions_of(run: Path, model: Path, out: Path) -> list[Path]:
    """Return the folder of the weights of each version that may have sampled."""
    folders = [model]
    for step in range(1, NUM_STEPS):
        folders.append(out / f"version_{step}")
        given = ("--checkpoint", run / "checkpoints" / f"step_{step:08d}", "--out", folders[-1])
        merged = fork_server.run_script(ROOT / "tools" / "convert" / "merger.py", *given, timeout_s=120)
        assert merged.returncode == 0, merged.stdout
    return folders


def check_versions(rollout: Rollout, models: list[torch.nn.Module], *, renderer: Renderer) -> set[int]:
    """Check the logprob of each sampled token; return the versions that sampled the rollout."""
    found: set[int] = set()
    for sequence in rollout.sequences:
        sampled = [place for place, mask in enumerate(sequence.loss_mask) if mask]
        own = torch.tensor([sequence.weight_versions[place] for place in sampled])
        recorded = torch.tensor([sequence.rollout_logprobs[place] for place in sampled], dtype=torch.float64)
        difference_VR = torch.stack([(logprobs_of(model, sequence, renderer)[sampled] - recorded).abs() for model in models])
        assert float(difference_VR.gather(0, own[None]).max()) <= LOGPROB_BOUND
        for version in {*own.tolist()}:
            others = [other for other in range(len(models)) if other != version]
            assert float(difference_VR[others][:, own == version].amax(1).min()) > 10 * LOGPROB_BOUND, "nothing to tell apart"
        found |= {*own.tolist()}
    return found


def logprobs_of(model: torch.nn.Module, sequence: TokenSequence, renderer: Renderer) -> torch.Tensor:
    """Return the logprob of each token given those before it, float64 [L]; 0 for the first one."""
    images = [replace(image, patch_PC=renderer.patches(image, lambda each: each.pil)) for image in sequence.images]
    logits = policy_logits(model, sequence.token_ids, images, renderer=renderer).log_softmax(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), logits[:-1].gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0]])


def test_a_killed_stale_run_trains_on_every_prompt_once(
    servers: tuple[str, ...], random_model: Path, questions: Path, tmp_path: Path
) -> None:
    """Both ranks are killed while agents of the next step are running; its prompts are sampled
    again by the next attempt.
    """
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    overrides = (*agent_overrides(questions, random_model, folder, folder / "metrics.jsonl"), *STALE, *servers)
    kill_with_agents(2, *overrides, after=folder / "checkpoints" / "step_00000001", temporary=temporary)
    assert f"resume: {folder}/checkpoints/step_0000000" in train(2, *overrides)
    lines = read_metrics(folder / "metrics.jsonl")[:-1]
    assert [line["step"] for line in lines] == list(range(NUM_STEPS))
    assert all(line["rollout_mismatch/logprob_abs_diff_max"] <= LOGPROB_BOUND for line in lines)
    assert sum(line["episodes"] for line in read_lines(folder / "prompts.jsonl")) == NUM_STEPS * NUM_EPISODES
    for step in range(NUM_STEPS):
        rollouts = list(read_rollouts(step_path(folder / "rollouts", step), with_images=False))
        versions = {version for each in rollouts for sequence in each.sequences for version in sequence.weight_versions if version >= 0}
        assert len(rollouts) == NUM_EPISODES and versions <= {step - 1, step}
