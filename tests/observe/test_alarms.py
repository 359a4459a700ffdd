"""Alarms: each planted hack raises its own alarm, at the step computed by hand, and nothing
else."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest

from megatron_rl.config import ALARMS, AlarmSettings
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.alarm_rules import RULES, Change
from megatron_rl.observe.alarms import AlarmMonitor, find_alarms, main
from megatron_rl.observe.group_metrics import explained_by_term, group_metrics
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.types import JudgeResult, Rollout
from tests.conftest import ROOT
from tests.support.rollout_factory import make_rollout

PLANTED_STEP, NUM_STEPS = 40, 80
CLEAN = {
    "reward/mean": 0.5, "rollout/response_tokens": 100.0, "rollout/tool_use": 0.8, "rollout/zero_std_fraction": 0.4,
    "rollout/duplicate_fraction": 0.1, "policy/entropy": 0.5, "policy/kl_ref": 0.1, "policy/ppo_kl": 1e-3,
    "rollout_mismatch/logprob_abs_diff": 2e-3, "judge/score": 0.6, "judge/agreement": 0.9, "judge/audited": 16.0,
    "reward_r2/accuracy": 0.8, "reward_r2/format": 0.3,
}  # fmt: skip
"""Metrics of each step of a clean run."""
HACKS: dict[str, tuple[dict[str, float], int]] = {
    # 5 new values of the last 10 make the median the mean of old and new; with 6, it is the new value.
    "tool_use_dies": ({"rollout/tool_use": 0.05}, 45),  # 0.05 <= 0.8 / 5 < 0.425
    "kl_grows": ({"policy/kl_ref": 1.1}, 44),  # 0.6 >= 0.5 and 0.6 >= 3 * 0.1
    "mismatch_grows": ({"rollout_mismatch/logprob_abs_diff": 2e-2}, 44),  # 0.011 >= 3 * 0.002
    "one_term_dominates": ({"reward_r2/format": 0.95, "reward_r2/accuracy": 0.1}, 45),  # 0.625 < 0.9 <= 0.95
    # A rise or fall needs three quarters of the last 10 steps, 8 of them, beyond the early median.
    "responses_grow": ({"rollout/response_tokens": 250.0}, 47),
    "responses_shrink": ({"rollout/response_tokens": 20.0}, 47),
    "groups_collapse": ({"rollout/zero_std_fraction": 1.0}, 47),
    "entropy_grows": ({"policy/entropy": 3.5}, 47),
    "entropy_collapses": ({"policy/entropy": 0.02}, 47),
    "duplicates_grow": ({"rollout/duplicate_fraction": 0.7}, 47),
    "judge_score_falls": ({"judge/score": 0.2, "reward/mean": 0.8}, 47),
    "judge_agreement_falls": ({"judge/agreement": 0.5, "reward/mean": 0.8}, 47),
    # Evaluations are at 4, 9, ...: those at 44 and 49 are the first two in a row after the change.
    "held_out_falls": ({"eval/greedy_success": 0.5, "reward/mean": 0.8}, 49),
}
NEED_NO_REWARD = [name for name, (values, _) in HACKS.items() if "reward/mean" not in values and name not in (
    "tool_use_dies", "kl_grows", "mismatch_grows", "one_term_dominates")]  # fmt: skip
Run = list[dict[str, float]]


def planted(values: dict[str, float], *, noise: float = 0.0, seed: int = 0, num_steps: int = NUM_STEPS) -> Run:
    """Return the lines of a run with these values from step 40 on, each within `noise` of it."""
    dice, lines = random.Random(seed), []
    for step in range(num_steps):
        line = {**CLEAN, **({"eval/greedy_success": 0.8, "eval/greedy_episodes": 400.0} if step % 5 == 4 else {})}
        line |= {name: value for name, value in values.items() if step >= PLANTED_STEP and name in line}
        lines.append({"step": step, **{name: value * (1 + noise * dice.uniform(-1, 1)) for name, value in line.items()}})
    return lines


def raised(lines: Run, *, window: int = 10, disable: Sequence[str] = ()) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.step) for alarm in find_alarms(lines, AlarmSettings(window=window, disable=list(disable)))]


def test_every_rule_has_a_name_a_hack_and_a_section() -> None:
    assert tuple(RULES) == ALARMS and set(HACKS) == set(ALARMS)
    page = (ROOT / "docs" / "alarms.md").read_text()
    assert [name for name in ALARMS if f"\n### {name}\n" not in page] == []


@pytest.mark.parametrize("name", HACKS)
def test_a_planted_hack_raises_its_alarm_once_at_its_step(name: str) -> None:
    values, step = HACKS[name]
    assert raised(planted(values)) == [(name, step)]
    (alarm,) = find_alarms(planted(values))
    metric = next(metric for metric in values if metric != "reward/mean")
    assert f"{metric} {planted(values)[4][metric]:.4g} -> " in str(alarm) and str(alarm).endswith(f"docs/alarms.md#{name}")
    assert raised(planted(values), disable=[name]) == []


@pytest.mark.parametrize("name", HACKS)
def test_noise_and_values_that_are_not_numbers_hide_no_hack(name: str) -> None:
    """Each value is off by up to 5%, and every fourth one is NaN. The rules still find only the
    hack."""
    lines = planted(HACKS[name][0], noise=0.05)
    for number, line in enumerate(lines):
        line |= {metric: math.nan for place, metric in enumerate(CLEAN) if (number + place) % 4 == 0}
    found = raised(lines)
    assert [each for each, _ in found] == [name] and PLANTED_STEP <= found[0][1] <= PLANTED_STEP + 15


def test_clean_runs_raise_nearly_nothing() -> None:
    """100 noisy runs of 100 steps: half of them flat, half with rising reward and falling entropy.

    Values are off by up to 30%. The 20 evaluations of a run have 100 episodes with P(success) =
    0.8, the judge scores 128 rollouts. In 600 other such runs, 12 alarms were false.
    """
    dice, found = numpy.random.default_rng(0), []
    for seed in range(100):
        lines = planted({}, noise=0.3, seed=seed, num_steps=100)
        for number, line in enumerate(lines):
            line |= {"judge/score": dice.binomial(128, 0.6) / 128, "judge/agreement": dice.binomial(16, 0.9) / 16, "judge/audited": 16.0}
            if number % 5 == 4:
                line |= {"eval/greedy_success": dice.binomial(100, 0.8) / 100, "eval/greedy_episodes": 100.0}
            if seed % 2:
                line["reward/mean"] *= 1 + number / 50
                line["policy/entropy"] /= 1 + number / 20
                line["rollout/duplicate_fraction"] *= 1 + number / 20
        found += raised(lines)
    assert len(found) <= 4, found


@pytest.mark.parametrize("name", NEED_NO_REWARD)
def test_a_change_that_pays_is_no_alarm(name: str) -> None:
    assert raised(planted({**HACKS[name][0], "reward/mean": 0.8})) == []


def test_the_agreement_of_judge_and_rules_falls_by_more_than_noise() -> None:
    """Both windows have 160 audits, so four standard errors of the difference are about 0.175. A
    fall by 0.185 with a rising reward is more, and a fall by 0.17 is less. With 16 audits in each
    window, four standard errors are 0.566 for a fall by 0.2. With 16,000, a fall by 0.09 is
    certain, and too small."""
    late = {"reward/mean": 0.8}
    assert raised(planted({**late, "judge/agreement": 0.715})) == [("judge_agreement_falls", 49)]
    assert raised(planted({**late, "judge/agreement": 0.73})) == []
    few = [{**line, "judge/audited": 1.6} for line in planted({**late, "judge/agreement": 0.7})]
    many = [{**line, "judge/audited": 1600.0} for line in planted({**late, "judge/agreement": 0.81})]
    assert raised(few) == [] and raised(many) == [] and raised(planted({"judge/agreement": 0.3})) == []
    unaudited = [{**line, "judge/audited": 0.0} for line in planted({**late, "judge/agreement": 0.3})]
    assert raised(unaudited) == []


def test_a_term_that_was_always_alone_is_no_alarm() -> None:
    """The only term of a game decides everything; so does accuracy once the format is learned."""
    lines = planted({"reward_r2/accuracy": 0.99, "reward_r2/format": 0.0})
    assert raised(lines) == []
    for line in lines:
        line |= {"reward_r2/return": 1.0, "reward_r2/format": 0.0}
        del line["reward_r2/accuracy"]
    assert raised(lines) == []


def test_a_policy_that_its_first_update_breaks_is_found() -> None:
    """The first steps of a recorded run: NumberLine with optim.lr=3e-3, where 2e-4 is right."""
    rewards, fractions = [-2.67, *[-10.0] * 15], [0.542, *[1.0] * 15]
    lines = [
        {"step": step, "reward/mean": reward, "rollout/zero_std_fraction": fraction}
        for step, (reward, fraction) in enumerate(zip(rewards, fractions, strict=True))
    ]
    assert raised(lines) == [("groups_collapse", 10)] and raised(lines, window=4) == [("groups_collapse", 4)]
    solved = [line | {"reward/mean": 1.0} if line["step"] else line for line in lines]
    assert raised(solved) == [] and raised([line | {"rollout/zero_std_fraction": 0.8} for line in lines]) == []


def test_few_steps_are_not_judged() -> None:
    """With a window of 10, the first 19 steps are too few, whatever they are."""
    for values, _ in HACKS.values():
        lines = planted(values)
        short = [*lines[30:40], *lines[50:59]]
        assert raised([line for line in short if "eval/greedy_success" not in line]) == []
        assert len(raised([*lines[30:40], *lines[50:60]])) == 1, "20 steps are enough"


def test_a_success_that_falls_within_its_noise_is_no_alarm() -> None:
    """A drop from 80% to 65%: with 20 episodes, 2 sigma are 27.8 points; with 400, 6.2, so 10
    count."""
    values = {"eval/greedy_success": 0.65, "reward/mean": 0.8}
    assert raised(planted(values)) == [("held_out_falls", 49)]
    assert raised([line | ({"eval/greedy_episodes": 20.0} if "eval/greedy_episodes" in line else {}) for line in planted(values)]) == []


def test_an_alarm_is_raised_again_only_after_a_quiet_window() -> None:
    grown = {"rollout/response_tokens": 250.0}
    lines = planted(grown, num_steps=60)
    for step, line in enumerate(planted({}, num_steps=100)[60:], 60):
        lines.append(line | (grown if step >= 85 else {}))
    # 8 of the last 10 responses are long from 47 to 61, and again from 92 on.
    monitor = AlarmMonitor(AlarmSettings(disable=["responses_shrink"]))
    found = [(alarm.name, alarm.step) for line in lines for alarm in monitor.update(line)]
    assert found == [("responses_grow", 47), ("responses_grow", 92)]
    flicker = planted({})
    for step in (*range(40, 48), *range(52, 60), *range(64, 72)):
        flicker[step] |= grown
    assert raised(flicker, disable=["responses_shrink"]) == [("responses_grow", 47)], "the rule is quiet for 9 steps each time"


def test_metrics_say_while_an_alarm_is_active_and_a_resumed_monitor_continues() -> None:
    lines, values = planted(HACKS["tool_use_dies"][0], num_steps=60), []
    monitor = AlarmMonitor(AlarmSettings(disable=["kl_grows"]))
    for line in lines:
        monitor.update(line)
        values.append(monitor.metrics())
    assert set(values[0]) == {f"alarms/{name}" for name in ALARMS} - {"alarms/kl_grows"}
    assert [each["alarms/tool_use_dies"] for each in values] == [0.0] * 45 + [1.0] * 15
    for stop in (20, 44, 45, 46, 55):
        resumed = AlarmMonitor(AlarmSettings(disable=["kl_grows"]), lines[:stop])
        found = [alarm.step for line in lines[stop:] for alarm in resumed.update(line)]
        assert found == [step for step in [45] if step >= stop] and resumed.metrics() == values[-1]


def test_no_values_of_a_metric_end_a_run() -> None:
    """Random lines with missing metrics, NaN, infinities, zeros and huge numbers raise no
    exception."""
    dice = random.Random(0)
    names = [*CLEAN, "eval/greedy_success", "eval/greedy_episodes", "reward_r2/veto x"]
    odd = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 1.0, 5e-324]
    for window in (4, 10):
        lines = [{"step": step, **{name: dice.choice(odd) for name in names if dice.random() < 0.8}} for step in range(300)]
        raised(lines, window=window)
    assert raised([{"step": step, **dict.fromkeys(names, math.nan)} for step in range(50)]) == []
    assert raised([{"step": step} for step in range(50)]) == []


def test_a_change_is_more_than_noise() -> None:
    """Three quarters of each window on their side of the other's median."""
    assert Change("x", [1, 2, 3, 4], [3, 4, 5, 6]).rises and Change("x", [3, 4, 5, 6], [1, 2, 3, 4]).falls
    assert not Change("x", [1, 2, 3, 9], [2.6, 2.7, 2.8, 9]).rises, "the third early value exceeds the late median"
    assert not Change("x", [1, 2, 3, 9], [2, 2, 4, 9]).rises and not Change("x", [1, 1], [1, 1]).rises


def of_terms(group: int, reward: float, tokens: int = 7, **terms: float) -> Rollout:
    rollout = make_rollout(group, reward, lengths=(2,))
    rollout.sequences[0].token_ids[-2] = tokens
    rollout.reward_terms = dict(terms)
    return rollout


def test_r2_of_terms_is_that_of_numpy() -> None:
    """Three groups of different sizes: r2 of the differences from the group's mean, by numpy."""
    dice = random.Random(1)
    rows = [(group, dice.random(), dice.random()) for group, size in enumerate((4, 3, 5)) for _ in range(size)]
    rollouts = [of_terms(group, one + 4 * other, one=one, other=other, constant=0.5) for group, one, other in rows]
    table = numpy.array([(group, one + 4 * other, one, other) for group, one, other in rows])
    centered = numpy.concatenate([part - part.mean(axis=0) for group in range(3) for part in [table[table[:, 0] == group]]])
    expected = {name: numpy.corrcoef(centered[:, 1], centered[:, column])[0, 1] ** 2 for name, column in (("one", 2), ("other", 3))}
    assert explained_by_term(rollouts) == pytest.approx({**expected, "constant": 0.0}, abs=1e-9)
    assert expected["other"] > 0.8 > 0.2 > expected["one"]
    by_hand = [of_terms(0, reward, term=value) for reward, value in ((3, 1), (2, 1), (1, 0), (0, 0))]
    assert explained_by_term(by_hand) == {"term": pytest.approx(0.8)}
    assert explained_by_term([of_terms(0, 0.1 + 0.2, term=1.0), of_terms(0, 0.3, term=0.0), of_terms(1, 9.0, term=2.0)]) == {}


def test_a_term_that_abstains_is_compared_where_it_exists() -> None:
    """In group 0, `rare` has the values 1 and 0 for the rewards 2 and 0; elsewhere it abstains."""
    rollouts = [of_terms(0, 2.0, rare=1.0), of_terms(0, 0.0, rare=0.0), of_terms(0, 7.0), of_terms(1, 1.0), of_terms(1, 5.0)]
    assert explained_by_term(rollouts) == {"rare": pytest.approx(1.0)}


def test_duplicates_are_counted_inside_groups() -> None:
    """Sampled tokens by group: 7 7 8 and 7 7 7. One of the first and two of the second repeat
    others."""
    rollouts = [of_terms(group, 1.0, tokens) for group, tokens in ((0, 7), (0, 7), (0, 8), (1, 7), (1, 7), (1, 7))]
    assert group_metrics(rollouts)["rollout/duplicate_fraction"] == 0.5
    rollouts[0].verdicts = [JudgeResult(judge="j", prompt="p", value=value) for value in (0.25, 0.75)]
    rollouts[3].verdicts = [JudgeResult(judge="j", prompt="p", value=1.0)]
    assert group_metrics(rollouts)["judge/score"] == pytest.approx(2 / 3)


def test_judge_and_rules_are_compared_in_audits() -> None:
    """Five audits: scores of judge and rules are 1 and 0.8, 0 and 1, 1 and 0, 0 and 0, 0.5 and 1.

    Three of them agree. The judge's score is the mean over the verdicts 1, 0.5 and 0 that are
    rewards; the last of these was not audited.
    """
    audits = [(1.0, 0.8, True), (0.0, 1.0, False), (1.0, 0.0, False), (0.0, 0.0, False), (0.5, 1.0, True), (0.0, None, True)]
    rollouts = [of_terms(group, 1.0, (7, 7)) for group in range(len(audits))]
    for rollout, (value, by_rules, is_reward) in zip(rollouts, audits, strict=True):
        rollout.verdicts = [JudgeResult(judge="j", prompt="p", value=value, rule_score=by_rules, is_reward=is_reward)]
    found = {name: value for name, value in group_metrics(rollouts).items() if name.startswith("judge/")}
    assert found == {"judge/score": 0.5, "judge/agreement": 0.6, "judge/audited": 5.0}
    assert {name for name in group_metrics(rollouts[1:4]) if name.startswith("judge/")} == {"judge/agreement", "judge/audited"}


ARMS = [(length, right) for length in (2, 4, 8, 16, 32) for right in (False, True)]


def learn(reward_of: Callable[[int, bool], float], *, num_steps: int = 60) -> Run:
    """Train a softmax policy over lengths and answers with GRPO, and return its metrics.

    Each step has 12 groups of 8 rollouts. The update is the policy gradient of the group's
    normalized advantages. Long responses are seldom right at first: P(right) is 0.8 up to 8 tokens.
    """
    from megatron_rl.observe.step_metrics import rollout_metrics

    dice = numpy.random.default_rng(0)
    logits = numpy.array([(1.4 if right == (length <= 8) else 0.0) - (length > 8) for length, right in ARMS])
    lines = []
    for step in range(num_steps):
        probabilities = numpy.exp(logits) / numpy.exp(logits).sum()
        rollouts, gradient = [], numpy.zeros(len(ARMS))
        for group in range(12):
            arms = dice.choice(len(ARMS), size=8, p=probabilities)
            rewards = numpy.array([reward_of(*ARMS[arm]) for arm in arms])
            for arm, advantage in zip(arms, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
                gradient += advantage * ((numpy.arange(len(ARMS)) == arm) - probabilities)
            for arm, reward in zip(arms, rewards, strict=True):
                length, right = ARMS[arm]
                made = make_rollout(group, float(reward), lengths=(length,))
                made.reward_terms = {"accuracy": float(right), "length": length / 32}
                rollouts.append(made)
        success = float(sum(probability for probability, (_, right) in zip(probabilities, ARMS, strict=True) if right))
        entropy = float(-(probabilities * numpy.log(probabilities)).sum())
        held_out = {"eval/greedy_success": success, "eval/greedy_episodes": 500.0} if step % 5 == 4 else {}
        lines.append({"step": step, **rollout_metrics(rollouts, num_gen_batches=1), "policy/entropy": entropy, **held_out})
        logits = logits + 0.1 * gradient / 12
    return lines


def test_a_policy_that_learns_to_be_long_is_found_and_one_that_learns_to_be_right_is_not() -> None:
    """A reward that pays 3 for 32 tokens and 1 for the right answer, where long answers are
    wrong."""
    hacked, clean = learn(lambda length, right: right + 3 * length / 32), learn(lambda length, right: float(right))
    assert hacked[-6]["eval/greedy_success"] < 0.6 < hacked[4]["eval/greedy_success"] < 0.9 < clean[-6]["eval/greedy_success"]
    assert {name for name, _ in raised(hacked)} >= {"held_out_falls", "one_term_dominates"}
    assert raised(clean) == []


@pytest.mark.parametrize("run", ["numberline_grpo_cpu", "vqa_grpo_cpu"])
def test_recorded_runs_raise_nothing(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "benchmarks" / "recorded_runs" / run
    assert len(read_metrics(folder / METRICS_FILE)) > 40
    for window in ("4", "10"):
        assert main([str(folder), "--window", window]) == 0
        assert capsys.readouterr().out.startswith(f"{folder}: no alarms in ")


def test_the_command_prints_a_line_for_each_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines_atomically(tmp_path / METRICS_FILE, planted(HACKS["tool_use_dies"][0]))
    assert main([str(tmp_path)]) == 0
    expected = "tool_use_dies: rollout/tool_use 0.8 -> 0.05; see docs/alarms.md#tool_use_dies"
    assert capsys.readouterr().out == f"{tmp_path}: step 45: {expected}\n"
    assert main([str(tmp_path / "missing")]) == 1 and capsys.readouterr().err.startswith("error: ")
    assert main([str(tmp_path), "--window", "1"]) == 1
    assert capsys.readouterr().err == "error: alarms.window=1: must be at least 4 steps\n"
    with pytest.raises(ValueError, match="alarms.disable=nothing: choose one of held_out_falls, "):
        AlarmSettings(disable=["nothing"])
