"""Tests how the options of a question are split, and an invariant of all benchmark readers: the
answer of a row earns full credit in every accepted form.
"""

import json
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings
from megatron_rl.data.benchmarks.catalog import BENCHMARKS, load_benchmark_questions
from megatron_rl.data.benchmarks.items import LETTERS, BenchmarkItem, shuffle_options
from megatron_rl.data.benchmarks.listed_options import INLINE_MARKER, find_listed_options, split_options
from megatron_rl.rewards.answer import compare_by_rules
from megatron_rl.rewards.benchmark_rules import score_by_benchmark
from tests.support.data_files import make_png


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("A. B; B. C; C. D; D. E; E. No correct answer", ("B", "C", "D", "E", "No correct answer")),
        ("A. B; B. C; C. D; D. No correct answer", ("B", "C", "D", "No correct answer")),
        ("A. \u2460;B\uff0e\u2461;C. \u2462; D. No correct answer", ("\u2460", "\u2461", "\u2462", "No correct answer")),
        ("A. 4 B. 3 C. 2 ;D. 1; E. No correct answer", ("4", "3", "2", "1", "No correct answer")),
        ("A. to get Shape ;C.; B. to Shape ;C.; C. Shape ;C.; D. No correct answer",
         ("to get Shape ;C.", "to Shape ;C.", "Shape ;C.", "No correct answer")),
        ("A. Yes, at ;O.;B. at ;O.;C. No.; F. No correct answer", ("Yes, at ;O.", "at ;O.", "No.", "No correct answer")),
        ("A. ∠AB;E.; B. ∠AB;C.; C. none.; D. No correct answer", ("∠AB;E.", "∠AB;C.", "none.", "No correct answer")),
    ],
)  # fmt: skip
def test_options_of_we_math(option: str, options: tuple[str, ...]) -> None:
    """A letter inside an option's words does not start a new option, so the options keep the
    letters of the file. The lines are shortened from We-Math's testmini.json.
    """
    assert split_options(option, INLINE_MARKER) == options


@pytest.mark.parametrize(
    ("question", "answer", "options"),
    [
        ("Is A larger? Choices: (A) yes (B) no", "B", ("yes", "no")),
        ("Which box? choice:(A) A (B) B (C) The same  ", "C", ("A", "B", "The same")),
        ("Sets A and B?\nA: [1, 4]\nB: [3]\n", "A", ("[1, 4]", "[3]")),
        ("Which?\nA. Group 1\nB. Group 2\nAnswer with a letter.", "B", ("Group 1", "Group 2")),
        ("Which y? (A) x + C (B) 2 + C", "A", ("x + C", "2 + C")),
        ("Only (A) one", "A", ()),
        ("Which? (A) x (B) y", "C", ()),
        ("How many?", "3", ()),
    ],
)
def test_options_in_a_question(question: str, answer: str, options: tuple[str, ...]) -> None:
    assert find_listed_options(question, answer=answer) == options


def test_options_that_name_places_in_the_picture_stay() -> None:
    """Options that are labels in the image are never shuffled, because the image's (A) would become
    another letter. The options are those of MATH-V, test.jsonl, rows 468, 490, 198 and 79.
    """
    for options in (("A)", "B)", "C)"), ("(A)", "(B)", "(C)"), ("$A$", "$B$", "Neither"), ("A", "B", "C or D"), ("K", "E", "N")):
        assert {shuffle_options(BenchmarkItem(question="?", answer="A", options=options), row_id=str(n), seed=3) for n in range(20)} == {
            (options, "A")
        }
    assert shuffle_options(BenchmarkItem(question="?", answer="AB", options=("x", "y")), row_id="0", seed=3) == (("x", "y"), "AB")


ABOUT = {"image": "x.png", "question": "Which?", "prompt": "Which?", "category": "c", "task": "color", "metadata": {}, "subject": "s"}
ABOUT |= {
    "cycle_category": "0",
    "problem_index": "1",
    "problem_version": "v",
    "question_type": "multi-choice",
    "key": "2steps_1",
    "ID": "2",
}
ABOUT |= {
    "imagename": "x.png",
    "skill": ["spatial"],
    "broad_capability": ["diagram"],
    "problem": "Which?",
    "image_1": "x.png",
    "qid": "1",
    "level": "1",
    "dataset": "d",
    "scene_name": "s",
}
WORDS = ["red", "light blue", "5 cm", "-3"]
SHIFTED = ["B", "C", "D", "E"]
TIR_ROWS = [("symbolic", "ABD"), ("math", "-12"), ("math", "0.5"), ("spot_difference", "1, 3"), ("spot_difference", "4"), ("ocr", "mobi")]
TIR_ROWS += [("word_search", "3, 4"), ("word_search", "5"), ("jigsaw", "2 1 4 3")]
DYNAMATH_ROWS = [
    ("float", "-1.571"),
    ("float", "12"),
    ("text", "Sep"),
    ("text", "(-1, 1)"),
    ("text", "3:0"),
    ("text", "[0, 3, 5]"),
    ("text", "A"),
]


def rows_of(benchmark: str) -> list[dict]:
    """Return rows with a benchmark's columns: multiple-choice rows with answers as words and as
    letters, in two orders, and rows with other kinds of answers.
    """
    lettered = [{**dict(zip("ABCD", words, strict=True)), "answer": letter} for words in (WORDS, SHIFTED) for letter in "ABCD"]
    listed = [("(A) yes (B) no", "AB"), ("(A) B (B) C (C) A", "ABC")]
    in_words = [{"answer": letter, "prompt": f"Which? {words}", "question": f"Which? {words}"} for words, all_ in listed for letter in all_]
    return {
        "vstar": lettered,
        "hrbench": lettered,
        "mathverse": [{"answer": answer} for answer in ("B", "12", "-3", "x + 1")],
        "mathvista": [{"choices": words, "answer": word, "answer_type": "text"} for words in (WORDS, SHIFTED) for word in words]
        + [{"answer": "-3", "answer_type": "integer"}, {"answer": "1.2", "answer_type": "float", "precision": 1}]
        + [{"answer": "[0, 2, 7]", "answer_type": "list"}],
        "vsi_bench": [{"options": [f"{a}. {b}" for a, b in zip("ABCD", WORDS, strict=True)], "ground_truth": letter} for letter in "ABCD"]
        + [{"ground_truth": "4"}, {"ground_truth": "2.5"}],
        "tir_bench": in_words + [{"task": task, "answer": answer, "metadata": {"difficulty": 2}} for task, answer in TIR_ROWS],
        "visualprobe": [{"answer": "a cat"}, {"answer": "-3"}],
        "mathvision": [{"options": words, "answer": letter} for words in (WORDS, SHIFTED) for letter in "ABCD"]
        + [{"options": [], "answer": answer} for answer in ("12", "-4", "$2\\sqrt{2}$")],
        "wemath": [
            {"option": "; ".join(f"{a}. {b}" for a, b in zip("ABCDE", [*words, "No correct answer"], strict=True)), "answer": letter}
            for words in (WORDS, SHIFTED) for letter in "ABCDE"
        ],
        "dynamath": [{**row, "answer_type": "multiple choice"} for row in in_words]
        + [{"answer_type": kind, "answer": answer} for kind, answer in DYNAMATH_ROWS],
        "vlmblind": [{"groundtruth": truth, "prompt": "?"} for truth in ("4", "5,6", "Yes", "e")],
        "puzzlevqa": [{"options": words, "answer": word} for words in (WORDS, SHIFTED) for word in words],
        "logicvista": in_words + [{"question": "Which two (A-D)?", "answer": answer} for answer in ("A, C", "G", "3")],
    }[benchmark]  # fmt: skip


def credit(payload: dict, answer: str) -> float | None:
    found = score_by_benchmark(payload["answer"], answer, payload["official"])
    return compare_by_rules(payload["answer"], answer, question=payload["question"]) if found is None else found


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_answer_of_a_row_earns_full_credit(benchmark: str, tmp_path: Path) -> None:
    """The reference answer earns full credit as it is written. In multiple-choice rows, so do the
    letter, `(B)`, `B.`, `B. words`, and the words unless they are another option's letter.
    """
    (tmp_path / "d" / "s").mkdir(parents=True)
    for path in (tmp_path / "x.png", tmp_path / "d" / "s" / "1.png"):
        path.write_bytes(make_png())
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(ABOUT | row) + "\n" for row in rows_of(benchmark)))
    examples = load_benchmark_questions(DataSettings(eval=[str(path)], benchmark=benchmark), "eval")
    assert len(examples) == len(rows_of(benchmark))
    for payload in (example.payload for example in examples):
        truth, options = payload["answer"], payload["official"]["options"] or payload["official"].get("choices", ())
        forms = [truth, f" {truth} "]
        if options:
            words = options[LETTERS.index(truth)]
            forms += [f"({truth})", f"{truth}.", f"{truth}. {words}", f"({truth}) {words}", f"{truth}: {words}"]
            forms += [words] if words not in LETTERS else []
        assert {form: credit(payload, form) for form in forms} == dict.fromkeys(forms, 1.0)
