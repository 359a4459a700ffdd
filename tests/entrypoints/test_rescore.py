"""launch/rescore.py computes the rewards of recorded rollouts again. Rewards by rule and by a judge
server are compared with expected values, also after a kill and with the judge down.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.entrypoints.rescore import find_prompt_images
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.recorder import save_images
from megatron_rl.observe.rollout_store import read_num_gen_batches, read_rollouts, step_path, write_step
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import JudgeResult, Rollout, Status, StopReason, Turn
from tests.conftest import ROOT
from tests.observe.test_recorder import picture
from tests.support import fork_server
from tests.support.fake_judge_server import JudgeReply, make_completion, serve_judge

ANSWERS = {"0": "red", "1": "two"}
SAID = [("0", "<answer>red</answer>"), ("0", "<answer>blue</answer>"), ("1", "<answer>two</answer>"), ("1", "no idea")]


def rollout_of(example: str, said: str, renderer: Renderer, *, sample: int) -> Rollout:
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(sample).pil}]}, {"role": "assistant", "content": said}]
    context = renderer.transcript(messages)
    span = (context.loss_mask.index(1), len(context.token_ids))
    turn = Turn(sequence=0, token_span=span, text=said, reward=0.0, step_score=9.0, reward_delta=9.0)
    return Rollout(
        task="vqa", example_id=f"train/{example}", group=int(example), sample_index=sample, sequences=[context], turns=[turn],
        stop_reason=StopReason.DONE, reward=9.0 - sample, outcome_reward=9.0, reward_terms={"old": 9.0}, filter_reason="zero_std",
        scoring_s=3.0, verdicts=[JudgeResult(judge="old", prompt="accuracy", value=1.0)],
    )  # fmt: skip


@pytest.fixture
def recorded(random_model: Path, tmp_path: Path) -> Path:
    """Write two recorded steps; the first contains a rollout that failed."""
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))
    rows = [{"question": "Which <image>?", "answer": answer, "images": []} for name, answer in ANSWERS.items()]
    write_lines_atomically(tmp_path / "questions.jsonl", [{**row, "question": "Which?"} for row in rows])
    rollouts = [rollout_of(example, said, renderer, sample=sample) for sample, (example, said) in enumerate(SAID)]
    failed = replace(
        rollouts[0], status=Status.FAILED, stop_reason=StopReason.INFRA_ERROR, reward=None, reward_terms={}, reason="judge down"
    )
    folder = tmp_path / "run" / "rollouts"
    for step, played in enumerate(([*rollouts, failed], rollouts[::-1])):
        save_images(folder, played)
        write_step(step_path(folder, step), played, step=step, num_gen_batches=step + 2)
    return folder


def rescored(recorded: Path, model: Path, out: Path, *words: str, code: int = 0) -> str:
    data = recorded.parents[1] / "questions.jsonl"
    given = ("task=vqa", f"task.data.train=[{data}]", f"task.data.eval=[{data}]", f"model.path={model}", f"rollouts.replay_from={recorded}")
    result = fork_server.run_script(ROOT / "launch" / "rescore.py", *given, f"run.dir={out}", *words, timeout_s=120)
    assert result.returncode == code, result.stdout
    return result.stdout


def rewards(folder: Path, step: int) -> list[float | None]:
    return [rollout.reward for rollout in read_rollouts(step_path(folder / "rollouts", step))]


def test_by_rule(recorded: Path, random_model: Path, tmp_path: Path) -> None:
    """All fields that scoring fills are new, and everything that was sampled is unchanged. A
    rollout that had failed stays failed. A second call rescores only the step that is missing.
    """
    out = tmp_path / "out"
    rescored(recorded, random_model, out)
    assert rewards(out, 0) == [1.0, 0.0, 1.0, 0.0, None] and rewards(out, 1) == [0.0, 1.0, 0.0, 1.0]
    old, new = (read_rollouts(step_path(folder, 0))[0] for folder in (recorded, out / "rollouts"))
    assert (
        new.reward_terms["accuracy"] == 1.0
        and "old" not in new.reward_terms
        and (new.turns[0].step_score, new.turns[0].reward_delta, new.filter_reason, new.verdicts) == (None, 0.0, "", [])
    )
    assert (
        new.outcome_reward == 1.0
        and new.scoring_s < 1.0
        and new.sequences == replace(old).sequences
        and new.turns[0].text == old.turns[0].text
    )
    assert read_num_gen_batches(step_path(out / "rollouts", 1)) == 3 and new.images[0].pil.tobytes() == old.images[0].pil.tobytes()
    told = json.loads((out / "scores.json").read_text())
    assert told == {
        "rollouts": 8.0,
        "failed_now": 0.0,
        "reward_before": 7.5,
        "reward_after": 0.5,
        "changed": 1.0,
        "rank_correlation": pytest.approx(0.447213595),
    }
    stamps = [step_path(out / "rollouts", step).stat().st_mtime_ns for step in range(2)]
    step_path(out / "rollouts", 0).unlink()
    rescored(recorded, random_model, out)
    again = [step_path(out / "rollouts", step).stat().st_mtime_ns for step in range(2)]
    assert again[0] > stamps[0] and again[1] == stamps[1], "the step that was there is not scored again"


def test_by_a_judge(recorded: Path, random_model: Path, tmp_path: Path) -> None:
    """The judge grades each response that no rule accepts, and its result is used. If the judge is
    down, the rollouts that it should have graded fail and get no reward.
    """
    out = tmp_path / "out"
    with serve_judge(lambda _: make_completion('{"correct": true}')) as server:
        words = ("task.reward=accuracy", f"task.judge.urls=[{server.url}]", "task.judge.model=judge")
        rescored(recorded, random_model, out, *words)
        assert server.bodies and rewards(out, 0)[1] > rewards(out, 0)[3], "a wrong colour is forgiven, a reply without an answer is not"
    with serve_judge(lambda _: JudgeReply("no", status=500)) as server:
        down = (
            "task.reward=accuracy",
            f"task.judge.urls=[{server.url}]",
            "task.judge.model=judge",
            "task.judge.max_attempts=1",
            "task.judge.outage_timeout_s=1",
        )
        said = rescored(recorded, random_model, tmp_path / "down", *down)
    assert "failed_now" in said and None in rewards(tmp_path / "down", 1)
    scores = json.loads((tmp_path / "down" / "scores.json").read_text())
    assert scores["failed_now"] == rewards(tmp_path / "down", 0)[:4].count(None) + rewards(tmp_path / "down", 1).count(None) > 0


def test_what_is_refused(recorded: Path, random_model: Path, tmp_path: Path) -> None:
    """Refused are other scores in the same folder, the recorded run's own folder, an example that
    is missing from the data, and a folder without steps.
    """
    rescored(recorded, random_model, tmp_path / "out")
    line = (
        f"error: run.dir={tmp_path}/out: contains scores computed with other settings: task.reward=pyvision (was ); choose another folder"
    )
    assert line in rescored(recorded, random_model, tmp_path / "out", "task.reward=pyvision", code=1)
    assert "the recorded run must not change" in rescored(recorded, random_model, recorded.parent, code=1)
    write_lines_atomically(tmp_path / "questions.jsonl", [{"question": "Which?", "answer": "red", "id": "another"}])
    assert "error: task.name: has no example 'train/1'" in rescored(recorded, random_model, tmp_path / "other", code=1)
    (tmp_path / "empty").mkdir()
    assert "error: rollouts.replay_from=" in rescored(tmp_path / "empty", random_model, tmp_path / "none", code=1)


def test_the_pictures_of_the_first_prompt(random_model: Path) -> None:
    """The prompt images are those before the first sampled token; images observed later are
    excluded.
    """
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))
    shown = [[{"type": "image", "image": picture(seed).pil} for seed in seeds] for seeds in ((1, 2), (3,))]
    messages = [
        {"role": "user", "content": shown[0]}, {"role": "assistant", "content": "a"}, {"role": "user", "content": shown[1]},
        {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    context = renderer.transcript(messages)
    rollout = Rollout(task="t", example_id="e", group=0, sample_index=0, sequences=[context])
    assert len(context.images) == 3 and find_prompt_images(rollout, renderer.image_token_id) == context.images[:2]
    assert find_prompt_images(replace(rollout, sequences=[]), renderer.image_token_id) == []
