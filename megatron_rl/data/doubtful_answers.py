"""Finds reference answers that a response can match but that are probably mistakes."""

import re
from collections.abc import Iterator, Mapping

from megatron_rl.data.answer_text import boxed_texts, comparison_form
from megatron_rl.data.answers import TAGGED, extract_answer, find_answer_doubt
from megatron_rl.data.question_options import find_options
from megatron_rl.data.unread import UnreadFinding, parse_options

MISSING = re.compile(
    r"[-+]?(?:nan|NaN|NAN)|None|NONE|[nN]ull|NULL|[nN]/[aA]|NA|<NA>|<N/A>|<na>|<n/a>|<null>|<none>|#N/A|#NA|NaT|[nN]il|undefined|\\N"
    r"|[-\u2010-\u2015]+|\?+"
)
"""Matches missing values as pandas, numpy, Python, JSON, SQL and spreadsheets write them.

`none` and `no` do not match, because people write them as answers.
"""
_LETTER_COLUMN = re.compile(r"(?:option|choice)?_?[a-h1-9]", re.IGNORECASE)
_MISSING_REMEDY = (
    "a response must contain that word; remove the rows, correct the answers, or read another column: 'task.data.columns={answer: COLUMN}'"
)
_DROPPED_REMEDY = "a response must give that one; write all values into one box, or check that the others are only intermediate steps"


def find_doubts(given: object, payload: Mapping[str, object], *, unread: Mapping[str, object]) -> Iterator[UnreadFinding]:
    """Yield a finding for each indication that a reference answer is wrong.

    Args:
        given: raw value of the answer in the file.
        payload: payload of the row's example.
        unread: values of the row that are not read, keyed by column.
    """
    answer, question = str(payload["answer"]), str(payload["question"])
    if MISSING.fullmatch(answer) and not _is_listed(answer, question, unread):
        yield UnreadFinding(
            "answer", "is a word for a missing value (nan, None, null, N/A, -)", _MISSING_REMEDY, False, is_error_in_all=True
        )
    if isinstance(given, str) and _are_several(given, answer):
        yield UnreadFinding("answer", "has several boxes or <answer> blocks; only the last is read", _DROPPED_REMEDY, is_error=False)
    if doubt := find_answer_doubt(answer, question):
        yield UnreadFinding("answer", *doubt, is_error=False)


def _is_listed(answer: str, question: str, unread: Mapping[str, object]) -> bool:
    """Return True if the answer is a word in the question, or a listed option.

    An option may be listed in the question or in a column of choices.
    """
    if answer[-1].isalpha() and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", question):
        return True
    if comparison_form(answer) in map(comparison_form, find_options(question).values()):
        return True
    columns = {name.removeprefix("extra_info."): value for name, value in unread.items()}
    letters = [value for name, value in columns.items() if _LETTER_COLUMN.fullmatch(name)]
    listed = [parse_options(value) for name, value in columns.items() if not _LETTER_COLUMN.fullmatch(name)]
    return any(len(options) > 1 and answer in options for options in (letters, *listed))


def _are_several(given: str, answer: str) -> bool:
    """Return True if a box or <answer> block in a text contains a value other than `answer`."""
    blocks = TAGGED.findall(given)
    marked = [*blocks, *boxed_texts(blocks[-1] if blocks else given)]
    return any(comparison_form(extract_answer(text)) not in ("", comparison_form(answer)) for text in marked)
