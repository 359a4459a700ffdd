"""Tests the checks that end a run, and the metrics of a step's rollouts, against numbers computed
by hand.
"""

import io
import resource
from pathlib import Path

import numpy
import pytest
import torch

from megatron_rl.algo.advantages import group_std
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.filtering import FILTERS, apply_filters
from megatron_rl.config import AlarmSettings, AlgoSettings, FilterSettings, RunSettings, Settings
from megatron_rl.distributed.world import World
from megatron_rl.errors import InfraOutage, RunFailed
from megatron_rl.observe.memory import GB, max_over_ranks, peak_memory
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.observe.step_metrics import idle_metrics, merge_update_metrics, rollout_metrics, staleness_metrics
from megatron_rl.run.failure_checks import check_failures, check_improvement
from megatron_rl.run.history import History
from megatron_rl.run.record import Run
from megatron_rl.types import Rollout, Status, StopReason, ToolCall
from tests.support.rollout_factory import make_rollout


def rollout(group: int, reward: float | None, sampled: int = 2) -> Rollout:
    made = make_rollout(group, reward, lengths=(sampled,))
    made.reward_terms = {} if reward is None else {"return": reward}
    made.reason = "sandbox down" if reward is None else "goal"
    made.wall_s, made.scoring_s = 9.0 if reward is None else 1.0 + group, 0.5
    return made


def credited(rollouts: list[Rollout], *drop: str) -> list[Rollout]:
    algo = AlgoSettings(norm_adv_by_std=False)
    apply_filters(rollouts, FilterSettings(drop=list(drop)), num_groups=9, group_std=group_std(rollouts, algo), needs_group=True)
    ALGORITHMS[algo.name].advantage_fn(rollouts, algo)
    return rollouts


@pytest.mark.known_failure("sandbox-failure-is-an-answer")
def test_failed_rollouts_end_the_run_above_the_limit() -> None:
    rollouts = [rollout(0, 1.0)] * 9 + [rollout(0, None)]
    check_failures(rollouts, limit=0.1)
    with pytest.raises(RunFailed, match="1 of 10 rollouts failed, above run.max_failed_fraction=0.09; first reason: sandbox down"):
        check_failures(rollouts, limit=0.09)


def test_an_outage_is_told_from_what_no_waiting_mends() -> None:
    """Only failures that a restart may fix raise InfraOutage: the run would have continued without
    the failures of unreachable services.
    """
    good, down, lasting = rollout(0, 1.0), rollout(0, None), rollout(0, None)
    down.stop_reason, lasting.stop_reason, lasting.reason = StopReason.INFRA_ERROR, StopReason.PERMANENT_INFRA_ERROR, "no room"
    cases = [([down] * 3, True), ([down, down, lasting], True), ([down, lasting, lasting], False), ([lasting] * 2, False)]
    for failed, is_outage in cases:
        with pytest.raises(RunFailed) as error:
            check_failures([good] * 7 + failed, limit=0.1)
        assert isinstance(error.value, InfraOutage) == is_outage, failed
        assert str(error.value).endswith(f"; first reason: {'sandbox down; the same command resumes the run' if is_outage else 'no room'}")


def test_a_failed_rollout_is_in_no_mean() -> None:
    rollouts = credited([rollout(0, 1.0), rollout(0, -1.0, sampled=4), rollout(0, None), rollout(1, 3.0), rollout(1, 3.0)])
    metrics = rollout_metrics(rollouts, num_gen_batches=2)
    assert metrics["reward/mean"] == metrics["reward/return"] == 1.5
    assert metrics["reward/std"] == pytest.approx(2.75**0.5)  # the squares of -0.5 -2.5 1.5 1.5 sum to 11, over 4 values
    assert metrics["rollout/sampled_tokens"] == 2 + 4 + 2 + 2
    assert (metrics["rollout/failed"], metrics["rollout/completed"], metrics["rollout/failed_fraction"]) == (1, 4, pytest.approx(0.2))
    assert metrics["rollout/zero_std_fraction"] == 0.5
    assert (metrics["rollout/num_gen_batches"], metrics["rollout/num_groups_used"], metrics["rollout/turns"]) == (2, 2, 1)
    times = [metrics[f"time/{name}"] for name in ("episode", "episode_max", "episode_environment", "episode_scoring")]
    assert times == [1.5, 2.0, 0.0, 0.5]


def test_lengths_by_hand() -> None:
    """Example by hand: an episode with turns of 2 and 5 tokens in one sequence and a turn of 3 in a
    second sequence, and an episode with one turn of 4. Each turn is surrounded by one observed
    token.
    """
    one, other = make_rollout(0, 1.0, lengths=(2, 5, 3), turn_sequences=(0, 0, 1)), make_rollout(0, 0.0, lengths=(4,))
    assert [len(context.token_ids) for context in (*one.sequences, *other.sequences)] == [11, 5, 6]
    metrics = rollout_metrics([one, other, rollout(0, None, sampled=99)], num_gen_batches=1)
    expected = {"episode_tokens": 7.0, "episode_tokens_max": 10.0, "response_tokens": 3.5, "response_tokens_max": 5.0,
                "sequence_tokens": 22 / 3, "sequence_tokens_max": 11.0, "sampled_tokens": 14.0}  # fmt: skip
    assert {name: metrics[f"rollout/{name}"] for name in expected} == expected


def test_data_sources_are_told_apart() -> None:
    """Two scored rollouts of one source with the rewards 1 and 0, one of a second source whose name
    is no valid metric name, and one without a source. A failed rollout counts in no mean.
    """
    rollouts = [rollout(group, reward) for group, reward in enumerate([1.0, 0.0, 3.0, 9.0, None])]
    for made, source in zip(rollouts, ["vstar", "vstar", "my data/v2\n", "", "vstar"], strict=True):
        made.source = source
    rollouts[1].reward_terms["format"] = 0.5
    metrics = rollout_metrics(rollouts, num_gen_batches=1)
    assert {name: value for name, value in metrics.items() if name.startswith("source/")} == {
        "source/vstar/reward": 0.5, "source/vstar/return": 0.5, "source/vstar/format": 0.5,
        "source/my_data_v2_/reward": 3.0, "source/my_data_v2_/return": 3.0,
    }  # fmt: skip


def test_of_very_many_sources_the_rare_are_one() -> None:
    """The 8 most frequent of 40 sources, with two rollouts each, and 24 other sources are named.
    The rest are merged.
    """
    rollouts = [rollout(number, float(number < 8)) for number in range(40)] + [rollout(number, 0.0) for number in range(8)]
    for made in rollouts:
        made.source = f"s{made.group}"
    told = {name: value for name, value in rollout_metrics(rollouts, num_gen_batches=1).items() if name.endswith("/reward")}
    assert len(told) == 33 and told["source/others/reward"] == 0 and all(told[f"source/s{number}/reward"] == 0.5 for number in range(8))


def test_memory_is_that_of_the_rank_that_took_most() -> None:
    """The peak memory grows by at least the allocated amount and stays after the memory is freed,
    up to pages that the kernel has not counted yet. Over ranks, the maximum is reported.
    """
    before = peak_memory()["memory/host_gb"]
    taken = numpy.ones(int((before + 0.5) * GB - resident()) // 8)
    after = peak_memory()["memory/host_gb"]
    del taken
    assert before + 0.4 < after < before + 0.6
    assert peak_memory()["memory/host_gb"] == pytest.approx(after, abs=0.02), "what was given back is in the peak"
    assert max_over_ranks([{"memory/host_gb": 1.0}, {"memory/host_gb": 3.0}, {"memory/host_gb": 2.0}]) == {"memory/host_gb": 3.0}


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_staleness_by_hand() -> None:
    """Example by hand at step 7: rollouts with tokens of versions 5 and 6, of 7 only, of 4 to 6,
    and of 7 only. One more rollout is filtered, and three stale rollouts were dropped before.
    """
    rollouts = credited([rollout(0, 1.0, sampled=3), rollout(0, -1.0), rollout(1, 3.0, sampled=4), rollout(1, 3.0), rollout(2, 5.0)])
    for made, versions in zip(rollouts, ([5, 5, 6], [7, 7], [4, 5, 5, 6], [7, 7], [1, 1]), strict=True):
        (context,) = made.sequences
        sampled = iter(versions)
        context.weight_versions = [next(sampled) if mask else -1 for mask in context.loss_mask]
    assert rollouts[4].filter_reason == "no_peer"
    assert staleness_metrics(rollouts, step=7, num_stale=3) == {
        "rollout/staleness": (2 + 0 + 3 + 0) / 4, "rollout/staleness_max": 3, "rollout/versions": (2 + 1 + 3 + 1) / 4,
        "rollout/filtered_stale": 3, "rollout/stale_fraction": 3 / 8,
    }  # fmt: skip
    assert staleness_metrics(rollouts[4:], step=7, num_stale=0)["rollout/staleness_max"] == 0
    times = {"time/engine": 2.0, "time/environment": 1.0, "time/update": 4.0, "time/unaccounted": 1.0, "time/total": 8.0}
    assert idle_metrics(times, busy_s=2.0) == {"rollout/engine_idle_fraction": 0.75, "trainer/idle_fraction": 0.375}
    assert idle_metrics(times, busy_s=6.0) == {"rollout/engine_idle_fraction": 0.25, "trainer/idle_fraction": 0.375}, (
        "it went on in the update"
    )


def test_an_engine_that_goes_on_in_the_update_is_not_idle(tmp_path: Path) -> None:
    """The idle fraction is computed from the engine's busy time between two records: 1 s in the
    first rollout phase of this attempt and 4 s in its update, then 3 s in a rollout phase and 8 s
    in an update with an evaluation.
    """
    settings, worked = Settings(run=RunSettings(dir=str(tmp_path), max_staleness=1)), [2.0]
    run = Run(settings, World(0, 1, 0, torch.device("cpu")), num_steps=2)
    for step, (rolling, training) in enumerate(((1.0, 4.0), (3.0, 8.0))):
        with run.timed_rollout(lambda: sum(worked)):
            worked.append(rolling)
        worked.append(training)
        run.record(step, {})
    run.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [round((1 - line["rollout/engine_idle_fraction"]) * line["time/total"], 6) for line in lines] == [5.0, 11.0]
    assert [line["time/engine"] for line in lines] == [1.0, 3.0]


def test_groups_that_teach_nothing_are_counted_without_those_that_have_nobody_to_compare_with() -> None:
    """Group 4 has the scores 1 and 3, group 9 has 2 and 2, group 7 has one scored rollout, and
    group 8 has none.
    """
    pairs = [(4, 1.0), (9, 2.0), (4, None), (7, 5.0), (4, 3.0), (7, None), (9, 2.0), (8, None)]
    for drop, zero_std, kept in (((), 0, 2), (("zero_std",), 2, 1)):
        metrics = rollout_metrics(credited([rollout(group, reward) for group, reward in pairs], *drop), num_gen_batches=1)
        assert metrics["rollout/zero_std_fraction"] == 0.5, "one of two, dropped or not"
        dropped = {reason: metrics[f"rollout/filtered_{reason}"] for reason in FILTERS}
        assert dropped == dict.fromkeys(FILTERS, 0) | {"no_peer": 1, "zero_std": zero_std}
        assert (metrics["rollout/num_groups_used"], metrics["rollout/failed"]) == (kept, 3)


def test_ends_and_tools_are_counted() -> None:
    """Two episodes make four tool calls: one raises an error, and one names a tool that does not
    exist. The second episode has no successful call.
    """
    rollouts = [rollout(0, 1.0), rollout(0, 0.0)]
    rollouts[0].turns = make_rollout(0, 1.0, lengths=(1, 1, 1)).turns
    rollouts[0].turns[0].tool_call = rollouts[0].turns[2].tool_call = ToolCall(tool="zoom", source="{}")
    rollouts[0].turns[1].tool_call = ToolCall(tool="zoom", source="{}", error="no box")
    rollouts[1].stop_reason, rollouts[1].status = StopReason.MAX_TURNS, Status.TRUNCATED
    rollouts[1].turns[0].tool_call = ToolCall(tool="x", source="", error="no such tool", ran=False)
    metrics = rollout_metrics(rollouts, num_gen_batches=1)
    assert (metrics["rollout/tool_use"], metrics["rollout/tool_calls"], metrics["rollout/tool_errors"]) == (0.5, 2.0, 0.5)
    assert (metrics["rollout/stop_done"], metrics["rollout/stop_max_turns"], metrics["rollout/truncated"]) == (1, 1, 1)
    assert metrics["rollout/turns"] == 2.0


def test_a_steps_updates_are_one_line() -> None:
    """Most metrics are averaged over the updates, metrics ending in _max are maxima, and some are
    those of the first update only.
    """
    gap = {
        "rollout_mismatch/logprob_abs_diff": 0.01,
        "rollout_mismatch/logprob_abs_diff_p99": 0.2,
        "rollout_mismatch/logprob_abs_diff_max": 0.3,
    }
    first = {"policy/ratio": 1.0, "policy/loss": 2.0, "policy/ratio_abs_dev_max": 0.1, **gap}
    second = {"policy/ratio": 1.5, "policy/loss": 4.0, "policy/ratio_abs_dev_max": 0.4, **{name: 3 * value for name, value in gap.items()}}
    assert merge_update_metrics([first]) == first and merge_update_metrics([]) == {}
    expected = {"policy/ratio": 1.25, "policy/first_ratio": 1.0, "policy/loss": 3.0, "policy/ratio_abs_dev_max": 0.4}
    assert merge_update_metrics([first, second]) == expected | gap
    weights = [
        {"rollout_mismatch/is_weight": 1.5, "rollout_mismatch/is_weight_squared": 3.0},
        {"rollout_mismatch/is_weight": 0.0, "rollout_mismatch/is_weight_squared": 0.0},
    ]
    merged = merge_update_metrics([update | {"policy/ratio": 1.0} for update in weights])
    assert merged == {
        "rollout_mismatch/is_weight": 0.75,
        "rollout_mismatch/is_eff_sample_size": 0.375,
        "policy/ratio": 1.0,
        "policy/first_ratio": 1.0,
    }
    assert merge_update_metrics(weights[:1])["rollout_mismatch/is_eff_sample_size"] == 0.75, (
        "weights 1, 1, 1, 3 of four tokens: 36 / (4 * 12)"
    )
    broken = merge_update_metrics([first, second | {"policy/ratio_abs_dev_max": float("nan")}, first])
    assert broken["policy/ratio_abs_dev_max"] != broken["policy/ratio_abs_dev_max"], "NaN is nobody's smaller number"


def test_what_was_not_learned_and_what_cannot_be_played_is_said(tmp_path: Path) -> None:
    """Two steps in which all rewards of each group are equal, one step with different rewards, and
    in each step an example whose prompt does not fit.
    """
    lost = make_rollout(2, None)
    lost.example_id, lost.stop_reason, lost.reason = (
        "train/7",
        StopReason.PERMANENT_INFRA_ERROR,
        "example train/7 (mine.jsonl row 7): its prompt has 9 tokens",
    )
    alike = [rollout(0, 1.0), rollout(0, 1.0), rollout(1, 2.0), rollout(1, 2.0), rollout(3, 1.0), lost]
    unlike = [rollout(0, 1.0), rollout(0, 2.0), lost]

    def played(folder: str, *steps: list[Rollout]) -> list[str]:
        run = Run(Settings(run=RunSettings(dir=str(tmp_path / folder))), World(0, 1, 0, torch.device("cpu")), num_steps=3)
        run.progress = ProgressDisplay(3, title="rl", stream=(shown := io.StringIO()))
        for step, rollouts in enumerate(steps):
            run.history.add(step, credited(rollouts), num_new_batches=1)
            run.log_step(step, rollouts, metrics := rollout_metrics(rollouts, num_gen_batches=1))
            run.record(step, metrics)
        run.finish({})
        run.close()
        lines = read_metrics(tmp_path / folder / "metrics.jsonl")
        expected = [float(rollouts is alike) for rollouts in steps]
        assert [line["rollout/all_groups_zero_std"] for line in lines[: len(steps)]] == expected
        assert {line["rollout/bad_prompts"] for line in lines[: len(steps)]} == {1.0}
        return shown.getvalue().splitlines()

    lines = played("some", alike, unlike, alike)
    assert lines[0] == f"permanent error, not retried: train/7: {lost.reason}", "once, with its file and row"
    assert ["rewards equal in every group: nothing learned" in line for line in lines[1:]] == [True, False, True]
    *_, last = played("never", alike, alike)
    assert last.startswith("nothing was learned in any of 2 steps: ") and "task" not in last
    assert not any(line.startswith("nothing") for line in lines)


def test_a_run_must_improve() -> None:
    check_improvement([0.0] * 10 + [0.1] * 10)
    with pytest.raises(RunFailed, match="no improvement: mean return 0.000 over the last 10 steps, 0.000 over the first 10"):
        check_improvement([0.0] * 20)


def test_a_step_whose_evaluation_is_owed_is_recorded_once(tmp_path: Path) -> None:
    """The attempt that runs a pending evaluation records its step. The step is recorded once even
    if an earlier attempt recorded it and ended before its own checkpoint.
    """
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(3)))
    history = History(pending_metrics={"loss": 1.0})
    run = Run(Settings(run=RunSettings(dir=str(tmp_path))), World(0, 1, 0, torch.device("cpu")), num_steps=9, first_step=3, history=history)
    run.record(2, {"loss": 1.0})
    run.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 1, 2, 3, 4], ""),
        ([0, 1, 2, 3, 4, 5, 6], ""),
        ([0, 1, 3, 4], "has no line for 1 completed steps (2); they are missing in plots and reports"),
        ([4], "has no line for 4 completed steps (0, 1, 2, 3); they"),
        ([], "has no line for 5 completed steps (0, 1, 2, 3, ...); they"),
        ([0, 1, 1, 2, 3, 4], "has lines that are out of order or duplicated"),
        ([0, 2, 1, 3, 4], "has lines that are out of order or duplicated"),
    ],
)
def test_lines_that_are_gone_are_named_when_a_run_goes_on(
    steps: list[int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resumes from step 5. Lines of later steps are moved and do not count as missing."""
    path, told = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(ProgressDisplay, "print_line", lambda _, line: told.append(line))
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in steps))
    run = Run(Settings(run=RunSettings(dir=str(tmp_path))), World(0, 1, 0, torch.device("cpu")), num_steps=9, first_step=5)
    run.close()
    lines = [line for line in told if line.startswith("warning: ")]
    assert (f"warning: {path} {said}" in lines[0] and len(lines) == 1) if said else lines == []


def test_alarms_are_printed_once_and_a_resumed_run_knows_them(tmp_path: Path) -> None:
    """Tool use falls from 1 to 0 at step 12 with windows of 4 steps: 3 of 4 values are new at step
    14. The run is resumed from step 16. The final evaluation is far below the one after step 20.
    The last rewards before them are 1.7 to 2.0, and 2.7 to 2.9 with the line of the final
    evaluation."""
    settings = Settings(run=RunSettings(dir=str(tmp_path)), alarms=AlarmSettings(window=4, disable=["kl_grows"]))
    shown = io.StringIO()

    def attempt(first: int, stop: int, *, finishes: bool) -> None:
        run = Run(settings, World(0, 1, 0, torch.device("cpu")), num_steps=30, first_step=first)
        run.progress = ProgressDisplay(30, title="rl", stream=shown)
        for step in range(first, stop):
            metrics = {"rollout/tool_use": float(step < 12), "reward/mean": step / 10}
            run.record(step, metrics | ({"eval/greedy_success": 0.9} if step == 20 else {}))
        if finishes:
            run.finish({"eval/greedy_success": 0.5})
        run.close()

    attempt(0, 18, finishes=False)
    attempt(16, 30, finishes=True)
    warnings = [line for line in shown.getvalue().splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: after step 15: tool_use_dies: rollout/tool_use 1 -> 0; see docs/alarms.md#tool_use_dies",
        "warning: after step 30: held_out_falls: eval/greedy_success 0.9 -> 0.5 while the reward rises (reward/mean 1.85 -> 2.8); "
        "see docs/alarms.md#held_out_falls",
    ]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [float(step) for step in range(31)]
    assert [line["alarms/tool_use_dies"] for line in lines] == [float(step >= 14) for step in range(31)]
    assert [line["alarms/held_out_falls"] for line in lines] == [0.0] * 30 + [1.0]
    assert not any("alarms/kl_grows" in line for line in lines)
    (tmp_path / "final").mkdir()
    attempt(30, 30, finishes=True)
    assert (tmp_path / "final").exists(), "the final evaluation is not repeated as a step, which would set the model aside"


def test_warm_starts_have_no_alarms(tmp_path: Path) -> None:
    run = Run(Settings(stage="sft", run=RunSettings(dir=str(tmp_path))), World(0, 1, 0, torch.device("cpu")), num_steps=3)
    run.record(0, {"loss": 1.0})
    run.close()
    assert not any(name.startswith("alarms/") for name in read_metrics(tmp_path / "metrics.jsonl")[0])
