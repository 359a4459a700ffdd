"""Tests when a judge is called, what it receives of a question with images, and how its calls are
counted. The server is a real HTTP server."""

import asyncio
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_rl.config import JudgeSettings, RunSettings, Settings
from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.distributed.world import World
from megatron_rl.errors import AccessDenied
from megatron_rl.observe.judge_stats import JudgeStats
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.observe.step_metrics import rollout_metrics
from megatron_rl.rewards import judge_prompt
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load_judge_prompt, remove_image_placeholders
from megatron_rl.rewards.rubrics import build_rubric
from megatron_rl.run.history import History
from megatron_rl.run.record import Run
from megatron_rl.types import JudgeResult, Rollout
from tests.rewards.test_rubrics import turn
from tests.support.fake_judge_server import (
    PROMPT,
    JudgeReply,
    answer_correct,
    make_completion,
    make_judge_settings,
    prompt_fields,
    run_judge,
    serve_judge,
)
from tests.support.fake_judge_server import make_judge_settings as judge_settings
from tests.support.rollout_factory import make_reward_input, make_rollout

PROMPTS = Path(judge_prompt.__file__).with_name("prompts")


def scored(judge: Judge, answer: str, *, truth: str = "red", source: str = "vstar", reward: str = "accuracy", question: str = "?") -> float:
    payload = {"question": question, "answer": truth, "data_source": source}
    outcome = make_reward_input(turn(f"<answer>{answer}</answer>"), payload=payload, images=[])
    return build_rubric(reward, judge=judge, tool_format="").score(outcome)


SURE = {
    "text": ("red", "red", "vstar"),
    "choice": ("B", "A", "vstar"),
    "number": ("4", "4.0", "vstar"),
    "numeric": ("90", "100", "x_rule_verifiable"),
}
"""Answer, reference and source of cases that rules decide."""


@pytest.mark.parametrize("always_ask", [False, True])
def test_always_ask_asks_about_every_answer(always_ask: bool) -> None:
    """With always_ask, the judge decides every answer. Its verdicts are the opposite of those of
    the rules, so the reward identifies which of them decided."""
    by_rules = {"text": 1.0, "choice": 0.0, "number": 1.0, "numeric": 0.8}
    verdict = {"red": False, "B": True, "4": False, "90": True}

    def behave(body: dict) -> JudgeReply:
        answer = json.loads(body["messages"][1]["content"].rpartition("answer: ")[2])
        return make_completion(json.dumps({"correct": verdict[answer]}))

    rewards = {}

    async def use(judge: Judge) -> None:
        for name, (answer, truth, source) in SURE.items():
            rewards[name] = (await scored(judge, answer, truth=truth, source=source)).reward
        void = make_reward_input(turn("no answer at all"), payload={"question": "?", "answer": "red", "data_source": "vstar"}, images=[])
        assert (await build_rubric("accuracy", judge=judge, tool_format="").score(void)).reward == 0.0

    with serve_judge(behave) as server:
        judge = run_judge(judge_settings(server, always_ask=always_ask), use)
        assert len(server.bodies) == (4 if always_ask else 0), "nothing that is void"
    assert rewards == ({"text": 0.0, "choice": 1.0, "number": 0.0, "numeric": 1.0} if always_ask else by_rules)
    assert judge.get_counts() == {"called": 4 if always_ask else 0, "cached": 0, "failed": 0}


@pytest.mark.parametrize("always_ask", [False, True])
def test_an_audit_asks_both_and_keeps_the_reward(always_ask: bool) -> None:
    """With audit_fraction=1, both the rules and the judge decide on each answer. The judge rejects
    every answer, and the rules leave "crimson" undecided."""
    cases = {**SURE, "undecided": ("crimson", "red", "vstar"), "void": ("", "red", "vstar")}
    found: dict[str, tuple[float, list[tuple[float | None, bool]]]] = {}

    async def use(judge: Judge) -> None:
        for name, (answer, truth, source) in cases.items():
            payload = {"question": "?", "answer": truth, "data_source": source}
            outcome = make_reward_input(turn(f"<answer>{answer}</answer>"), payload=payload, images=[])
            score = await build_rubric("accuracy", judge=judge, tool_format="").score(outcome)
            assert all(verdict.value == 0.0 for verdict in outcome.rollout.verdicts)
            found[name] = score.reward, [(verdict.rule_score, verdict.is_reward) for verdict in outcome.rollout.verdicts]

    with serve_judge(lambda _: make_completion('{"correct": false}')) as server:
        run_judge(judge_settings(server, always_ask=always_ask, audit_fraction=1.0), use)
    by_rules = {"text": 1.0, "choice": 0.0, "number": 1.0, "numeric": 0.8}
    wanted = {name: (0.0 if always_ask else value, [(value, always_ask)]) for name, value in by_rules.items()}
    assert found == {**wanted, "undecided": (0.0, [(None, True)]), "void": (0.0, [])}


def test_an_audit_that_fails_is_left_out_and_a_rejected_key_is_not() -> None:
    """An audit of a judge that is down changes neither reward nor status. HTTP 401 ends the run."""
    status = [503]

    async def use(judge: Judge) -> None:
        outcome = make_reward_input(
            turn("<answer>red</answer>"), payload={"question": "?", "answer": "red", "data_source": "vstar"}, images=[]
        )
        rubric = build_rubric("accuracy", judge=judge, tool_format="")
        assert (await rubric.score(outcome)).reward == 1.0 and outcome.rollout.verdicts == []
        status[:] = [401]
        with pytest.raises(AccessDenied):
            await rubric.score(outcome)

    with serve_judge(lambda _: JudgeReply("busy", status=status[0])) as server:
        run_judge(judge_settings(server, audit_fraction=1.0, max_attempts=1, outage_timeout_s=0.2), use)
        assert len(server.bodies) == 2


def test_the_fraction_of_audits_is_the_setting() -> None:
    """A tenth of 2,000 rollouts is audited (within four standard deviations), always the same, and
    none with the fraction 0."""
    rollouts = [replace(make_rollout(number // 8, 0.0), sample_index=number % 8) for number in range(2000)]
    judges = [Judge(JudgeSettings(model="qwen", cache="kept", audit_fraction=fraction)) for fraction in (0.0, 0.1, 0.1, 1.0)]
    drawn = [[judge.is_audited(rollout) for rollout in rollouts] for judge in judges]
    assert drawn[1] == drawn[2] and abs(sum(drawn[1]) - 200) <= 4 * math.sqrt(180) and (sum(drawn[0]), sum(drawn[3])) == (0, 2000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"always_ask": True}, "task.judge.always_ask=True: no judge is configured; set task.judge.urls"),
        ({"audit_fraction": 0.1}, "task.judge.audit_fraction=0.1: no judge is configured; set task.judge.urls"),
        ({"audit_fraction": 1.1, "urls": ["http://j/v1"]}, "task.judge.audit_fraction=1.1: must be between 0 and 1"),
        ({"audit_fraction": math.nan, "urls": ["http://j/v1"]}, "task.judge.audit_fraction=nan: must be between 0 and 1"),
    ],
)
def test_settings_that_need_a_judge_are_refused_without_one(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        JudgeSettings(**settings)


def test_what_was_asked_is_counted() -> None:
    """The counts equal hand-computed ones for three different requests: one is made twice at once,
    one again later, and the first HTTP request fails."""
    failures = [JudgeReply("busy", status=503)]

    def behave(body: dict) -> JudgeReply:
        return failures.pop() if failures else answer_correct(body)

    async def use(judge: Judge) -> None:
        await judge.score(PROMPT, fields=prompt_fields("a"))
        await asyncio.gather(*(judge.score(PROMPT, fields=prompt_fields(answer)) for answer in ("b", "b", "c")))
        await judge.score(PROMPT, fields=prompt_fields("a"))

    with serve_judge(behave) as server:
        judge = run_judge(make_judge_settings(server), use)
    assert judge.get_counts() == {"called": 3, "cached": 2, "failed": 1}


@pytest.mark.parametrize("path", sorted(PROMPTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_prompt_shows_a_places_name(path: Path) -> None:
    """No judge prompt contains an image placeholder from its fields, and placeholders do not change
    the cached request."""
    names = re.findall(r"\$(\w+)", yaml.safe_load(path.read_text())["user"])
    prompt = load_judge_prompt(path.stem, examples="general" if path.stem == "answer_equivalence" else "")
    text = prompt.render({name: f"<image>\nHow many {name}s?<image>" for name in names})
    assert "question" in names and "image>" not in text
    assert all(f': "How many {name}s?"' in text for name in names if name != "examples")
    assert text == prompt.render({name: f"How many {name}s?" for name in names}), "a kept verdict is found again"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<image>How many?", "How many?"),
        ("<image>\n<image>\nCompare <image> and <image>.", "Compare and ."),
        ("First.\n<image>\nSecond.", "First.\nSecond."),
        ("1<image>2", "1 2"),
        ("See <image 1> and <image1>.", "See <image 1> and <image1>."),
        ("  as it is ", "  as it is "),
    ],
)
def test_places_are_left_out(text: str, shown: str) -> None:
    """Image placeholders are removed from a text together with their line breaks."""
    assert judge_prompt.IMAGE_PLACEHOLDER == IMAGE_PLACEHOLDER and remove_image_placeholders(text) == shown


def test_an_example_without_a_data_source_is_judged() -> None:
    """The payload of a user's own task may have no data source. Rules and judge decide as for an
    unknown one."""

    async def use(judge: Judge) -> None:
        for answer, reward in (("red", 1.0), ("B", 0.0), ("crimson", 1.0)):
            outcome = make_reward_input(turn(f"<answer>{answer}</answer>"), payload={"question": "?", "answer": "red"}, images=[])
            assert (await build_rubric("accuracy", judge=judge, tool_format="").score(outcome)).reward == reward, answer

    with serve_judge(lambda body: make_completion(json.dumps({"correct": "crimson" in body["messages"][1]["content"]}))) as server:
        run_judge(make_judge_settings(server), use)
        assert "crimson" in server.bodies[-1]["messages"][1]["content"]


def test_the_question_that_a_judge_reads_has_no_place() -> None:
    async def use(judge: Judge) -> None:
        assert (await scored(judge, "crimson", question="<image>What color?")).reward == 1.0

    with serve_judge(answer_correct) as server:
        run_judge(make_judge_settings(server), use)
        (body,) = server.bodies
    assert 'question: "What color?"' in body["messages"][1]["content"] and "image>" not in body["messages"][1]["content"]


class Counter:
    """Counters of a judge, set by a test."""

    model = "qwen"

    def __init__(self) -> None:
        self.now = {"called": 0, "cached": 0, "failed": 0}

    def get_counts(self) -> dict[str, int]:
        return dict(self.now)


def judged(reward: float, *, by_judge: bool) -> Rollout:
    rollout = make_rollout(0, reward)
    rollout.verdicts = [JudgeResult(judge="qwen", prompt="p 1", value=1.0)] if by_judge else []
    return rollout


def run_of(
    folder: Path, steps: list[Mapping[str, int]], *, decided: int, history: History | None = None
) -> tuple[list[dict], str, History]:
    """Return metrics, last line of output, and history of a run with two ranks whose judges have
    equal counts in each step."""
    judge, shown = Counter(), io.StringIO()
    run = Run(Settings(run=RunSettings(dir=str(folder))), World(0, 1, 0, torch.device("cpu")), num_steps=len(steps), history=history)
    run.judge_stats = JudgeStats(judge, gather=lambda counts: [counts, counts])
    run.progress = ProgressDisplay(len(steps), title="rl", stream=shown)
    for step, counts in enumerate(steps):
        rollouts = [judged(float(number), by_judge=number < decided) for number in range(4)]
        judge.now = {name: judge.now[name] + counts.get(name, 0) for name in judge.now}
        run.history.add(step, rollouts, num_new_batches=1)
        run.log_step(step, rollouts, metrics := rollout_metrics(rollouts, num_gen_batches=1))
        run.record(step, metrics)
    run.history.num_learning_steps = 1
    run.finish({})
    run.close()
    return read_metrics(folder / "metrics.jsonl"), shown.getvalue().splitlines()[-1], run.history


def test_a_run_counts_its_judges_work_over_all_ranks(tmp_path: Path) -> None:
    """Metrics and the last line of a run count the judge's calls over both ranks, and the last line
    also those of earlier attempts."""
    lines, last, history = run_of(tmp_path / "a", [{"called": 2, "cached": 1}, {"called": 1, "failed": 3}], decided=1)
    names = ("judge/called", "judge/cached", "judge/failed", "judge/decided_fraction")
    assert [[line[name] for name in names] for line in lines[:2]] == [[4, 2, 0, 0.25], [2, 0, 6, 0.25]]
    assert last == "judge qwen: 6 verdicts requested, 2 cached, 6 requests failed; the judge decided 25% of 8 answers"
    _, last, _ = run_of(tmp_path / "b", [{}], decided=0, history=history)  # the next attempt
    assert last == "judge qwen: 6 verdicts requested, 2 cached, 6 requests failed; the judge decided 17% of 12 answers"


def test_a_judge_that_was_never_asked_is_named_at_the_end(tmp_path: Path) -> None:
    """A judge that was configured and never called leads to a warning at the end of a run."""
    lines, last, _ = run_of(tmp_path / "a", [{}, {}], decided=0)
    assert [line["judge/called"] for line in lines[:2]] == [0, 0]
    remedy = "task.judge.always_ask=true sends every answer to the judge"
    assert last == f"warning: judge qwen is configured but was never called: rules decided all 8 answers; {remedy}"
