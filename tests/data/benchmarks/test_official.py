"""Tests how an answer is scored by each benchmark's rules, and the metrics that are published for a
benchmark. Oracles: numbers computed by hand from the benchmarks' descriptions.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.data.benchmarks.benchmark_scores import ItemScore, we_math_metrics
from megatron_rl.data.benchmarks.catalog import BENCHMARKS, compute_benchmark_metrics, compute_official_interval
from megatron_rl.evaluation.evaluation_report import collect_example_results
from megatron_rl.evaluation.paired_comparison import compare_evaluations, read_evaluation
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.rewards.benchmark_rules import edit_distance, score_by_benchmark
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.vqa import VqaTask
from megatron_rl.types import Example, Rollout, Turn
from tests.support.data_files import make_png
from tests.support.rollout_factory import make_reward_input

COLORS = ("red", "light blue", "green")


def credit(benchmark: str, truth: str, answer: str, **by: object) -> float | None:
    return score_by_benchmark(truth, answer, {"benchmark": benchmark, "options": (), **by})


@pytest.mark.parametrize(
    ("answer", "right"),
    [("B", 1), ("(B)", 1), ("B.", 1), ("B. light blue", 1), ("Light Blue", 1), ("A", 0), ("red", 0), ("C) green", 0), ("D", 0),
     ("it is light blue", None), ("", None), ("blue", None)],
)  # fmt: skip
@pytest.mark.parametrize("benchmark", ["vstar", "hrbench", "mathvision", "wemath", "vsi_bench", "puzzlevqa"])
def test_letters(benchmark: str, answer: str, right: float | None) -> None:
    assert credit(benchmark, "B", answer, options=COLORS) == right


def test_a_truth_that_is_no_letter_is_left_to_the_general_rules() -> None:
    assert credit("mathvision", "12", "12") is None and credit("mathverse", "B", "B") is None and credit("visualprobe", "x", "x") is None


def test_the_position_of_an_option_is_no_answer_of_mathvision() -> None:
    """MATH-V compares an answer with the letter and the text of the right option only. Where options
    are numbers, a number may be the text of an option, so the general rules decide.
    """
    labels = ("A", "B", "C", "D", "E")
    assert [credit("mathvision", "B", answer, options=labels) for answer in ("2", "(2)", "02.", "2nd", "2.5")] == [0, 0, 0, None, None]
    assert credit("mathvision", "B", "2", options=("4 cm", "2 cm")) is None and credit("mathvision", "2", "2") is None
    assert credit("vstar", "B", "2", options=labels) is None, "the general rules accept a position"


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [("C", "C", 1), ("C", "(c)", 1), ("C", "c", 1), ("C", "d", 0), ("C", "C. blue", 1), ("C", "T", 0), ("C", "t", 0), ("C", "#", None),
     ("C", "A, C", 0), ("C", "C, C", None), ("C", "blue", None), ("C", "the third one", None), ("C", "", None),
     ("C", "3", None), ("C", "3 cm", None),
     ("A, C", "A, C", 1), ("A, C", "c and a", 1), ("A, C", "AC", 1), ("A, C", "A", 0), ("A, C", "A, B, C", 0), ("A,C", "(A) (C)", 1),
     ("3", "3", None), ("I, II", "I", None)],
)  # fmt: skip
def test_logicvista(truth: str, answer: str, right: float | None) -> None:
    """LogicVista's options are in the picture. Its script compares sorted lists of letters."""
    assert credit("logicvista", truth, answer, choices=()) == right


def test_logicvista_reads_the_text_of_a_listed_option() -> None:
    found = [credit("logicvista", "B", answer, choices=("True", "False", "")) for answer in ("false", "B) False", "True", "D", "d")]
    assert found == [1, 1, 0, 0, 0]
    assert [credit("logicvista", "B", answer, choices=("True", "False", "")) for answer in ("2", "(3)", "2 of them")] == [0, 0, None]
    assert credit("logicvista", "B", "2", choices=("1 cm", "2 cm")) is None, "the general rules compare the numbers"


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [("4", "4", 1.0), ("10", "10.4", 1.0), ("10", "11", 0.9), ("10", "15", 0.1), ("10", "15.1", 0.0), ("10", "9.5", 1.0),
     ("10", "5 m", 0.1),
     ("10", "about ten", 0.0), ("2.5", "2", 0.6), ("4", "3 or 4", 0.0)],
)  # fmt: skip
def test_vsi_numbers(truth: str, answer: str, right: float) -> None:
    """The answer 11 for 10 has a relative error of 0.1, which is within 1 - 0.90 and all larger
    tolerances, but not within 1 - 0.95. The answer 2 for 2.5 has an error of 0.2, which exceeds 1 -
    0.8 in floating point.
    """
    assert credit("vsi_bench", truth, answer) == pytest.approx(right)


@pytest.mark.parametrize(
    ("by", "truth", "answer", "right"),
    [
        ({"answer_type": "integer", "precision": 0}, "7", "7.9 cm", 1), ({"answer_type": "integer", "precision": 0}, "7", "8", 0),
        ({"answer_type": "float", "precision": 1}, "1.2", "1.24", 1), ({"answer_type": "float", "precision": 1}, "1.2", "1.26", 0),
        ({"answer_type": "float", "precision": 2}, "1.2", "1.24", 0), ({"answer_type": "float", "precision": 2}, "1.2", "none", 0),
        ({"answer_type": "list", "precision": 0}, "[1, 2]", "[1,2]", 1), ({"answer_type": "list", "precision": 0}, "[1, 2]", "[2,1]", 0),
        ({"answer_type": "text", "precision": 0}, "cat", "cat", None),
        ({"answer_type": "choice", "precision": 0, "options": COLORS}, "B", "(B)", 1),
        ({"answer_type": "choice", "precision": 0, "options": COLORS}, "B", "a light blue", 1),
        ({"answer_type": "choice", "precision": 0, "options": COLORS}, "B", "rod", 0),
        ({"answer_type": "choice", "precision": 0, "options": COLORS}, "A", "rod", 1),
    ],
)  # fmt: skip
def test_mathvista(by: Mapping[str, object], truth: str, answer: str, right: float | None) -> None:
    assert credit("mathvista", truth, answer, **by) == right


def test_edits_between_words() -> None:
    assert [
        edit_distance("kitten", "sitting"),
        edit_distance("", "abc"),
        edit_distance("abc", ""),
        edit_distance("flaw", "lawn"),
        edit_distance("same", "same"),
    ] == [3, 3, 3, 2, 0]


@pytest.mark.parametrize(
    ("task", "truth", "answer", "right"),
    [
        ("ocr", "mobi", "it reads mobile", 1), ("ocr", "mobi", "Mobi", 0),
        ("jigsaw", "2 1 4 3", "2, 1, 3, 4", 0.5), ("jigsaw", "2 1 4 3", "rows 1 2\n2 1 4 3", 0),
        ("jigsaw", "2 1 4 3", "in 2 parts: 2 1 4 3", 1),
        ("jigsaw", "2 1 4 3", "2 1 4", 0),
        ("spot_difference", "1, 3", "1, 2, 3", 2 / 3), ("spot_difference", "1, 3", "none", 0),
        ("spot_difference", "4", "4", 1),
        ("word_search", "3, 4", "at 3,4", 1), ("word_search", "3, 4", "4, 3", 0), ("word_search", "3, 4", "3", 0),
        ("word_search", "5", "5", 1),
        ("color", "A", "A. red", 1), ("color", "A", "B", 0), ("color", "A", "reddish", None),
        ("symbolic", "ABD", "B, A, D", 1), ("symbolic", "ABD", "ABC", 0),
        ("instrument", "2.5", "2.50 cm", 1), ("math", "12", "13", 0), ("math", "12", "\\frac{24}{2}", None),
    ],
)  # fmt: skip
def test_tir_bench(task: str, truth: str, answer: str, right: float | None) -> None:
    found = credit("tir_bench", truth, answer, task=task, side=2)
    assert found == (right if right is None else pytest.approx(right))


@pytest.mark.parametrize(
    ("kind", "truth", "answer", "right"),
    [
        ("float", "1.234", "1.2345", 1), ("float", "1.234", "1.236", 0), ("float", "6.283", "2\u03c0", 1), ("float", "3.142", "\u03c0", 1),
        ("float", "2", "two", None), ("multiple choice", "B", "b", 1), ("multiple choice", "B", "(B)", 1),
        ("multiple choice", "B", "A or B", 0),
        ("text", "even", "an even function", 1), ("text", "even function", "even", 0), ("text", "even", "odd", 0), ("text", "even", "", 0),
    ],
)  # fmt: skip
def test_dynamath(kind: str, truth: str, answer: str, right: float | None) -> None:
    assert credit("dynamath", truth, answer, answer_type=kind) == right


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("4", "{4}", 1),
        ("4", "14", 0),
        ("5,6", "rows={5} columns={6}", 1),
        ("5,6", "6,5", 0),
        ("Yes", "yes.", 1),
        ("e", "{e}", 1),
        ("e", "a", 0),
    ],
)
def test_vlmblind(truth: str, answer: str, right: float) -> None:
    assert credit("vlmblind", truth, answer) == right


@settings(deadline=None)
@given(
    st.sampled_from(sorted(BENCHMARKS)), st.text(max_size=60), st.sampled_from(["ocr", "jigsaw", "spot_difference", "word_search", "color"])
)
def test_no_answer_breaks_a_rule(benchmark: str, answer: str, task: str) -> None:
    for truth in ("B", "12", "1, 2", "1 2 3 4"):
        for kind in ("float", "integer", "list", "text", "multiple choice"):
            found = credit(benchmark, truth, answer, options=("a", "b"), task=task, side=2, answer_type=kind, precision=1)
            assert found is None or 0 <= found <= 1


def test_the_task_scores_by_the_benchmark(tmp_path: Path) -> None:
    """The rubric of every task with questions scores by the benchmark's rules: a close number earns
    partial credit, unlike in the general rules, and an invalid answer earns nothing. A row of the
    user's own data cannot name a benchmark.
    """
    vsi = {"question_type": "object_counting", "question": "How many?", "ground_truth": "10", "dataset": "d", "scene_name": "s"}
    (tmp_path / "d" / "s").mkdir(parents=True)
    (tmp_path / "d" / "s" / "1.png").write_bytes(make_png())
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(vsi) + "\n")
    data = DataSettings(train=[str(path)], eval=[str(path)], benchmark="vsi_bench")
    for task, replies in (
        (VqaTask(TaskSettings(name="vqa", data=data)), ("<answer>11</answer>", "<answer>11</answer><answer>10</answer>")),
        (VisualPythonTask(TaskSettings(name="visual_python", data=data)), ("<answer>\n\\boxed{11}\n</answer>", "11")),
    ):
        payload = task.examples("eval")[0].payload
        scores = [
            asyncio.run(task.rubric.score(make_reward_input(Turn(sequence=0, token_span=(0, 1), text=reply), payload=payload))).reward
            for reply in replies
        ]
        assert scores == [pytest.approx(0.9), 0.0]
    row = {"question": "?", "answer": "10", "official": {"benchmark": "vsi_bench", "options": []}, "data_source": "vsi_bench"}
    path.write_text(json.dumps(row) + "\n")
    plain = VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=[str(path)]))).examples("eval")[0]
    assert "official" not in plain.payload
    outcome = make_reward_input(Turn(sequence=0, token_span=(0, 1), text="<answer>11</answer>"), payload=plain.payload)
    assert asyncio.run(VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=[str(path)]))).rubric.score(outcome)).reward == 0.0


def played(*credits: tuple[str, Mapping[str, str], float], sample: int = 0) -> tuple[list[Example], list[Rollout]]:
    """Return one example and one rollout for each (unit, labels, credit)."""
    examples = [Example(id=str(n), payload={"official": {"unit": unit, "labels": labels}}) for n, (unit, labels, _) in enumerate(credits)]
    rollouts = [
        Rollout(task="t", example_id=str(n), group=n, sample_index=sample, reward=value, reward_terms={"accuracy": value})
        for n, (_, _, value) in enumerate(credits)
    ]
    return examples, rollouts


def test_hrbench_is_the_mean_of_its_cycles() -> None:
    """Example by hand: cycle 0 has the credits 1, 0, 0, of which the first is a single question;
    cycle 1 has one correct item. The score is (1/3 + 1) / 2.
    """
    items = [("a", "single", "0", 1.0), ("b", "cross", "0", 0.0), ("c", "cross", "0", 0.0), ("a", "single", "1", 1.0)]
    found = compute_benchmark_metrics(
        "hrbench", *played(*((unit, {"category": kind, "cycle": cycle}, value) for unit, kind, cycle, value in items))
    )
    assert found == pytest.approx({"official": 2 / 3, "category_single": 1.0, "category_cross": 0.0, "cycle_0": 1 / 3, "cycle_1": 1.0})


def test_vsi_bench_is_the_mean_of_its_kinds() -> None:
    """The three direction types count as one type: the score is (0.5 + (1 + 0 + 0.8) / 3) / 2."""
    kinds = {
        "object_counting": 0.5,
        **{f"object_rel_direction_{level}": value for level, value in (("easy", 1.0), ("medium", 0.0), ("hard", 0.8))},
    }
    found = compute_benchmark_metrics("vsi_bench", *played(*((kind, {"type": kind}, value) for kind, value in kinds.items())))
    assert found["official"] == pytest.approx(0.55) and found["type_object_rel_direction_easy"] == 1.0


def test_we_math_by_hand() -> None:
    """Example by hand with four problems of two steps: all answers correct; both steps correct and
    the whole problem wrong; one step and the whole problem correct; only one step correct. A
    problem of three steps without its last step is not counted.
    """
    answers = {"1": (1, 1, 1), "2": (1, 1, 0), "3": (1, 0, 1), "4": (1, 0, 0)}
    scored = [
        ItemScore(unit, {"key": f"2steps_{part}"}, float(value))
        for unit, row in answers.items()
        for part, value in zip("12m", row, strict=True)
    ]
    scored = [ItemScore(each.unit_id, {"key": each.labels["key"].replace("_m", "_multi")}, each.credit) for each in scored]
    scored += [ItemScore("5", {"key": f"3steps_{part}"}, 1.0) for part in ("1", "2", "multi")]
    strict, loose = we_math_metrics(scored, strict=True), we_math_metrics(scored, strict=False)
    assert strict == {"score": 0.375, "mastered": 0.25, "memorized": 0.5, "not_generalized": 0.25, "lacking": 0.25}
    assert loose == {"score": 0.625, "mastered": 0.5, "memorized": 0.0, "not_generalized": 0.25, "lacking": 0.25}
    assert we_math_metrics(scored[-3:], strict=True) == {}


def test_dynamath_has_a_worst_case() -> None:
    labels = {"subject": "algebra", "level": "high school", "type": "float"}
    found = compute_benchmark_metrics("dynamath", *played(("1", labels, 1.0), ("1", labels, 1.0), ("2", labels, 1.0), ("2", labels, 0.0)))
    assert (found["official"], found["worst_case"], found["level_high_school"]) == (0.75, 0.5, 0.75)


def test_several_samples_are_several_evaluations() -> None:
    """The worst case is computed for each sample and then averaged: 1/2 and 0. The worst case over
    both samples together would be 0.
    """
    labels = {"subject": "a", "level": "b", "type": "float"}
    examples, first = played(("1", labels, 1.0), ("2", labels, 0.0))
    _, second = played(("1", labels, 0.0), ("2", labels, 0.0), sample=1)
    found = compute_benchmark_metrics("dynamath", examples, [*first, *second])
    assert (found["official"], found["worst_case"]) == (0.25, 0.25)


def test_the_interval_draws_units() -> None:
    """The bootstrap interval resamples units, not items. With two units of 50 equal items, the
    resampled mean is 0, 1/2 or 1; resampling items would keep it near 1/2. If all credits are
    equal, the interval is a point.
    """
    labels = {"category": "x", "cycle": "0"}
    unlike = compute_official_interval("hrbench", *played(*[("a", labels, 1.0)] * 50, *[("b", labels, 0.0)] * 50))
    assert unlike == {"official_low": 0.0, "official_high": 1.0}
    assert compute_official_interval("hrbench", *played(*[("a", labels, 1.0)] * 5)) == {"official_low": 1.0, "official_high": 1.0}


def test_no_benchmark_has_no_figures() -> None:
    examples, rollouts = played(("a", {"category": "x"}, 1.0))
    assert compute_benchmark_metrics("", examples, rollouts) == {} == compute_official_interval("", examples, rollouts)
    for rollout in rollouts:
        rollout.reward_terms.clear()
    assert compute_benchmark_metrics("vstar", examples, rollouts) == {}


def test_rows_that_are_read_as_they_are_have_no_figures() -> None:
    """Rows of task.data.train have no benchmark metrics, even if a benchmark is named for
    task.data.eval.
    """
    examples, rollouts = played(("a", {"category": "x"}, 1.0))
    plain = [replace(each, payload={}) for each in examples]
    assert compute_benchmark_metrics("vstar", plain, rollouts) == {} == compute_official_interval("vstar", plain, rollouts)
    assert compute_benchmark_metrics("vstar", examples, rollouts)


def test_comparisons_go_by_credit(tmp_path: Path) -> None:
    """Evaluations are compared by credit: 0.6 and 0.9 against 0.8 and 0.9 differ by 0.1 on average,
    although both evaluations solve the same examples with a threshold of one half.
    """
    task = VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=["x.jsonl"])))
    for name, values in (("one", (0.6, 0.9)), ("other", (0.8, 0.9))):
        examples, rollouts = played(*((str(n), {}, value) for n, value in enumerate(values)))
        (tmp_path / name).mkdir()
        write_lines_atomically(tmp_path / name / "examples.jsonl", collect_example_results(task, examples, rollouts))
        (tmp_path / name / "evaluation.json").write_text(json.dumps({"scores": {}, "stated": {}}))
    found = compare_evaluations(read_evaluation(tmp_path / "one"), read_evaluation(tmp_path / "other"))
    assert found.mean == pytest.approx(0.1) and not math.isnan(found.p_value)
