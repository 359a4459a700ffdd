"""Tests reference answers: numbers keep their decimal form, and an answer that no response can
match is refused with file and row.
"""

import datetime
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.answers import extract_answer
from megatron_rl.data.decimal_forms import decimal_text
from megatron_rl.data.questions import load_questions


def answers_in(path: Path) -> list[object]:
    return [example.payload["answer"] for example in load_questions([str(path)], images_root="", name="train")]


def test_numbers_keep_their_decimal_form(tmp_path: Path) -> None:
    """Numbers from JSON, Parquet (double, float, decimal, date) and Arrow become the text that a
    person would write, without an exponent (public case R8).
    """
    wanted = ["0.00001", "10000000000000000000000", "0.1", "-0.0000025", "3.0", "123456789.125"]
    values = [1e-5, 1e22, 0.1, -2.5e-6, 3.0, 123456789.125]
    lines = tmp_path / "numbers.jsonl"
    lines.write_text("\n".join(json.dumps({"question": "q", "answer": value}) for value in values))
    assert answers_in(lines) == wanted
    kinds = {"double": pa.float64(), "decimal": pa.decimal128(38, 12), "float": pa.float32()}
    for name, kind in kinds.items():
        given_values = [Decimal(text) for text in wanted] if name == "decimal" else values
        table = pa.table({"question": ["q"] * 6, "answer": pa.array(given_values, kind)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        found = answers_in(tmp_path / f"{name}.parquet")
        if name == "decimal":
            assert [Fraction(text) for text in found] == [Fraction(text) for text in wanted] and not any("E" in text for text in found)
        else:
            assert found[:5] == wanted[:5] and float(found[5]) == (123456789.125 if name == "double" else np.float32(123456789.125))
    dates = pa.table({"question": ["q"], "answer": [datetime.date(2023, 5, 4)]})
    pq.write_table(dates, tmp_path / "dates.parquet")
    assert answers_in(tmp_path / "dates.parquet") == ["2023-05-04"]


@pytest.mark.parametrize(
    ("given_answer", "answer"),
    [
        *[
            ("Answer: B", "B"),
            ("The answer is 5.", "5."),
            ("**Answer:** 5", "5"),
            ("**Answer**: 5", "5"),
            ("the final answer is: -5", "-5"),
        ],
        *[("Answer: $5$", "$5$"), ("Answer: |x|", "|x|"), ("answer", "answer"), ("Answer key: 5", "Answer key: 5"), ("Answer:", "Answer:")],
    ],
)
def test_words_before_a_reference_are_not_its_answer(given_answer: str, answer: str) -> None:
    assert extract_answer(given_answer) == answer


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_decimal_text_has_no_exponent_and_the_same_value(value: float) -> None:
    text = decimal_text(value)
    assert "e" not in text.casefold()
    assert float(text) == value or np.float32(text) == np.float32(value) == value


@pytest.mark.known_failure("unreachable-references")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("x" * 1000, "has 1000 characters, but at most 999 are allowed in a response; write the short answer alone"),
        ("\\boxed{3", r"contains \boxed, which makes the answer of a response invalid; write the answer without tags and boxes"),
        ("<answer>3", "contains <answer>, which makes the answer of a response invalid"),
        ("use <code>x</code>", "contains <code>, which makes the answer of a response invalid"),
        ("...", "contains only punctuation, which is ignored in comparisons; write a word or a number"),
        ("$$", "contains only punctuation, which is ignored in"),
        ("\u200b", "contains only punctuation, which is ignored in"),
        ("", "is empty"),
        (" ", "is empty"),
        ("<answer> </answer>", "is empty"),
        (True, "is true; write the expected word"),
        (["B"], "must be text or a number, not list; write it as text, in the form expected in a response"),
        (float("nan"), "is nan, which is not a finite number; remove"),
    ],
)
def test_references_that_no_reply_matches_are_refused(answer: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": "q", "answer": each}) for each in ("fine", answer)))
    with pytest.raises(ValueError, match=r"^q\.jsonl row 1: answer: ") as error:
        load_questions([str(path)], images_root="", name="train")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("answer", "question", "says"),
    [
        (
            "2",
            "Which?\nA. red\nB. blue",
            "is a number, but the options of the question are A, B: the number may count from 0 or from 1; write the letter",
        ),
        ("E", "Which? (A) red (B) blue", "is E, but the options of the question are A, B: correct the letter, or list all options"),
        (
            "The cat\nis red.",
            "Which?",
            "has several lines: a response must repeat it word for word unless a judge is used; write the short",
        ),
        ("x" * 200, "Which?", "has 200 characters or more: "),
        ('["red", "blue"]', "Which?", "is a list or a mapping, written as text: a response must repeat it verbatim; write the short"),
        ("{'value': 3, 'unit': 'cm'}", "How long?", "is a list or a mapping, written as text: "),
        ("[1, 2]", "Which interval?", ""),
        ("{1, 2}", "Which set?", ""),
        ("[red]", "Which?", ""),
        ("2", "How many?\nA. 1\nB. 2", ""),
        ("2", "How many?", ""),
        ("B", "Which? (A) red (B) blue", ""),
        ("E", "Which letter?", ""),
        ("(E)", "Which? (A) red (B) blue", "is (E), but the options of the question are A, B: correct the letter, or list all options"),
        ("B. red", "Which? (A) red (B) blue", "is B. red, but option B of the question is blue: correct the letter or the text"),
        ("B. Blue", "Which? (A) red (B) blue", ""),
        ("(B) blue.", "Which? (A) red (B) blue", ""),
    ],
)
def test_doubtful_references_are_named(answer: str, question: str, says: str, tmp_path: Path) -> None:
    """Warn once for all rows of a file. The file has no images, so its first warning is about
    images.
    """
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": question, "answer": answer}) for _ in range(3)))
    _, *found = load_questions([str(path)], images_root="", name="train").warnings
    assert len(found) == bool(says) and all(says in line and line.startswith("q.jsonl: column answer ") for line in found)
