"""Tests the warnings about answers that are probably unintended, with the number of rows and the
first row. The expected results are written by hand.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_rl.data.questions import load_questions, open_questions
from megatron_rl.data.survey import survey_questions

MISSING = "column answer is a word for a missing value (nan, None, null, N/A, -)"
SEVERAL = "column answer has several boxes or <answer> blocks; only the last is read"
WRITTEN = "column answer is a list or a mapping, written as text"


def named(folder: Path, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the warnings about the answers of a file with these rows."""
    path = folder / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": "Which?"} | row) for row in rows))
    return [line for line in load_questions([str(path)], images_root="", name="train").warnings if "column answer" in line]


@pytest.mark.parametrize(
    "word", ["nan", "NaN", "-nan", "None", "null", "NULL", "N/A", "n/a", "NA", "<NA>", "#N/A", "NaT", "\\N", "-", "--", "\u2014", "?"]
)
def test_a_word_for_a_missing_value_is_named(word: str, tmp_path: Path) -> None:
    (line,) = named(tmp_path, [{"answer": "red"}, {"answer": word}, {"answer": word}])
    assert line.startswith(f"q.jsonl row 1: {MISSING} (2 of 3 rows): a response must contain that word; remove the rows")


def test_words_of_one_kind_share_a_line_in_tables_and_columns_that_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("question,answer\nWhich?,red\nWhich?,nan\nWhich?,None\n")
    (line,) = [line for line in load_questions([str(tmp_path / "q.csv")], images_root="", name="train").warnings if "column answer" in line]
    assert line.startswith(f"q.csv row 1: {MISSING} (2 of 3 rows): ")
    (line,) = named(tmp_path, [{"reward_model": {"ground_truth": "red"}}, {"reward_model": {"ground_truth": "\\boxed{None}"}}])
    assert line.startswith(f"q.jsonl row 1: {MISSING} (1 of 2 rows): ")


def test_a_file_whose_answers_are_all_missing_is_refused(tmp_path: Path) -> None:
    for name, answers in {"a.jsonl": ["None", "nan", "NA"], "b.jsonl": ["red", "blue"]}.items():
        (tmp_path / name).write_text("\n".join(json.dumps({"question": "Which?", "answer": answer}) for answer in answers))
    paths = [str(tmp_path / name) for name in ("b.jsonl", "a.jsonl")]
    with pytest.raises(ValueError, match=r"^a\.jsonl: column answer is a word for a missing value .*: a response must contain that word; "):
        load_questions(paths, images_root="", name="train")
    found = survey_questions(open_questions(paths, images_root="", name="train"))
    assert (
        len(found.errors) == 1 and found.num_errors == 3 and found.num_more_errors == 0 and not any("answer" in w for w in found.warnings)
    )


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "None", "options": ["cat", "dog", "None"]},
        {"answer": "None", "choices": "['cat', 'None']"},
        {"answer": "None", "extra_info": {"option_a": "cat", "option_b": "None"}},
        {"answer": "N/A", "question": "Which?\nA. red\nB. N/A"},
        {"answer": "None", "question": "Which one: red, blue or None?"},
        {"answer": "-", "question": "Which? (A) + (B) -"},
        *[{"answer": answer} for answer in ("none", "no", "Nan Goldin", "Na", "-5", "0", "nano", "A")],
    ],
)
def test_a_listed_option_and_words_of_a_person_are_not_missing(row: dict, tmp_path: Path) -> None:
    assert not [line for line in named(tmp_path, [row] * 2) if MISSING in line]


@pytest.mark.parametrize(
    ("answer", "is_named"),
    [
        (r"\boxed{A} or \boxed{B}", True),
        (r"x=\boxed{1}, y=\boxed{2}", True),
        (r"\fbox{1} \boxed{2}", True),
        ("<answer>A</answer> or <answer>B</answer>", True),
        (r"<answer>\boxed{1}, \boxed{2}</answer>", True),
        (r"\boxed{A}. So \boxed{a}.", False),
        (r"\boxed{\boxed{3}}", False),
        (r"<answer>\boxed{3}</answer>", False),
        (r"First \boxed{1, then <answer>3</answer>", False),
        ("<answer>A</answer> <answer>A</answer>", False),
        (r"so \boxed{5}", False),
    ],
)
def test_a_second_box_is_named_once(answer: str, is_named: bool, tmp_path: Path) -> None:
    found = named(tmp_path, [{"answer": "red"}, *[{"answer": answer}] * 3])
    assert [line.partition(" (3 of 4 rows): a response must give that one; write all values")[0] for line in found if "boxes" in line] == (
        [f"q.jsonl row 1: {SEVERAL}"] if is_named else []
    )


@pytest.mark.parametrize(
    ("answer", "is_named"),
    [("[red, blue]", True), ("[red car, blue]", True), ("[B, C]", False), ("[a, b]", False), ("[red]", False), (r"[\pi, \infty]", False)],
)
def test_a_list_without_quotation_marks_is_named(answer: str, is_named: bool, tmp_path: Path) -> None:
    """A list of letters is a set of choices and equals `B, C`. Two letters or numbers may be an
    interval.
    """
    assert any(WRITTEN in line for line in named(tmp_path, [{"answer": answer}])) is is_named
