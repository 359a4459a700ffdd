r"""Extracts the reference answer of a row in a form that a response can match.

The answer is text or a number. If a text contains <answer> blocks, only the last block is searched;
otherwise, the whole text is searched. The answer is the content of the last \boxed{...} or
\fbox{...} in the searched text, else the text after `####` on the last line (GSM8K), else the
searched text itself. Numbers are converted to text as described in decimal_forms.py. A reference
answer that no response can match raises an error.
"""

import datetime
import math
import re
from collections.abc import Mapping
from decimal import Decimal

from megatron_rl.data.answer_text import comparison_form, extract_last_box
from megatron_rl.data.column_names import ANSWER_COLUMNS
from megatron_rl.data.decimal_forms import decimal_text, looks_widened
from megatron_rl.data.images import shorten
from megatron_rl.data.literals import parse_literal, parse_text_list
from megatron_rl.data.question_options import find_options
from megatron_rl.data.records import DataRecord

MAX_ANSWER_CHARS = 1000
"""Length in characters at which an answer in a response becomes invalid (rewards/answer.py).

An answer that contains a tag of an agent protocol is invalid at any length.
"""
MAX_EXPECTED_CHARS = 200
"""Length in characters at which a reference answer is reported as probably a whole solution."""
PROTOCOL_TAG = re.compile(
    r"</?(?:answer|interpreter|code|think|tool_call|tool_response|sandbox_output)>|\\(?:boxed|fbox)|<\|", re.IGNORECASE
)
_LEAD_IN = re.compile(
    r"\s*(\*\*|__|\*)?(?:the\s+)?(?:(?:final|correct|right)\s+)?answer"
    r"(?(1)(?:(?:\s+is)?\s*:\1|(?:\s+is)?\1\s*:|\s+is\1)|(?:(?:\s+is)?\s*:|\s+is(?=\s)))\s*(?=\S)",
    re.IGNORECASE,
)
"""Matches a lead-in such as `Answer: 5`, `The answer is 5.` or `**Answer:** 5`."""
_MARKED_OPTION = re.compile(r"(?:\(([A-Z])\)|([A-Z])(?=[.:)]|\Z))[.:)]?(?:\s+(\S.*))?")
"""Matches an option letter, alone or followed by the option's text: `E`, `(E)`, `E. red`."""
_LIST_OF_WORDS = re.compile(r"\[\s*[^\W\d_]{2}[^\[\],\\]*(?:,\s*[^\W\d_]{2}[^\[\],\\]*)+\]")
"""Matches a list of unquoted words, such as `[red, blue]`.

Lists of single letters do not match, because they are choices: `[B, C]` compares equal to `B, C`.
"""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reference_answer(record: DataRecord, extra: Mapping[str, object]) -> str:
    """Return the row's reference answer.

    Raises:
        ValueError: the row has no answer, or no response can match the answer. The message names
            the file, the row and the fix.
    """
    found = given_answer(record, extra)
    if found is None:
        raise record.make_error("answer", "is missing; a row must have reward_model.ground_truth, extra_info.answer, answer or solution")
    answer = extract_answer(record.require_text(_as_text(record, found), "answer"))
    if not answer:
        raise record.make_error("answer", "is empty")
    if reason := unmatchable_reason(answer):
        raise record.make_error("answer", f"{shorten(repr(answer))} {reason}")
    return answer


def given_answer(record: DataRecord, extra: Mapping[str, object]) -> object:
    """Return the raw value of the row's answer, or None if the row has no answer."""
    model = record.require_mapping(record.row.get("reward_model", {}), "reward_model")
    given = (model.get("ground_truth"), extra.get("answer"), *(record.row.get(name) for name in ANSWER_COLUMNS))
    return next((value for value in given if value is not None), None)


def extract_answer(text: str) -> str:
    """Return the answer contained in a text.

    The last <answer> block is searched, or the whole text if there is no block. If the searched
    text contains a box or ends with a GSM8K line (`#### 42`), only the content of the last box or
    of that line is returned.
    """
    text = (TAGGED.findall(text) or [text])[-1]
    boxed = extract_last_box(text)
    return without_lead_in(text if boxed is None else boxed)


def without_lead_in(text: str) -> str:
    """Return the text that follows lead-ins such as `Answer:` and `The answer is`."""
    at = 0
    while lead_in := _LEAD_IN.match(text, at):
        at = lead_in.end()
    return text[at:].strip()


def unmatchable_reason(answer: str) -> str:
    """Return why no response can match a reference answer, or "" if a response can match it."""
    if len(answer) >= MAX_ANSWER_CHARS:
        return f"has {len(answer)} characters, but at most {MAX_ANSWER_CHARS - 1} are allowed in a response; write the short answer alone"
    if tag := PROTOCOL_TAG.search(answer):
        return f"contains {tag[0]}, which makes the answer of a response invalid; write the answer without tags and boxes"
    if not comparison_form(answer):
        return "contains only punctuation, which is ignored in comparisons; write a word or a number"
    return ""


def find_answer_doubt(answer: str, question: str) -> tuple[str, str] | None:
    """Return (description, remedy) for a likely mistake in a reference answer, or None."""
    options = find_options(question)
    listed = f"but the options of the question are {', '.join(options)}"
    is_option = any(comparison_form(text) == comparison_form(answer) for text in options.values())
    if options and answer.isdigit() and answer not in options and not is_option:
        return f"is a number, {listed}", "the number may count from 0 or from 1; write the letter"
    if (marked := _MARKED_OPTION.fullmatch(answer)) and "A" in options:
        letter, words = marked[1] or marked[2], comparison_form(marked[3] or "")
        if letter not in options:
            return f"is {answer}, {listed}", "correct the letter, or list all options"
        if words and words != comparison_form(options[letter]):
            return f"is {answer}, but option {letter} of the question is {options[letter]}", "correct the letter or the text"
    is_written = answer.startswith(("[", "{")) and (isinstance(parse_literal(answer), Mapping) or isinstance(parse_text_list(answer), list))
    if is_written or _LIST_OF_WORDS.fullmatch(answer):
        return "is a list or a mapping, written as text", "a response must repeat it verbatim; write the short answer alone"
    if looks_widened(answer):
        many = "a response must repeat all digits; write 0.1 instead of 0.10000000149011612, for example"
        return "looks like a float32 number printed with the digits of a float64", many
    if "\n" in answer or len(answer) >= MAX_EXPECTED_CHARS:
        long = "has several lines" if "\n" in answer else f"has {MAX_EXPECTED_CHARS} characters or more"
        return long, "a response must repeat it word for word unless a judge is used; write the short answer alone"
    return None


def _as_text(record: DataRecord, value: object) -> str:
    if isinstance(value, bool):
        raise record.make_error("answer", f'is {str(value).lower()}; write the expected word, for example "yes" or "no"')
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise record.make_error("answer", f"is {value}, which is not a finite number; remove the row or correct its answer")
        text = decimal_text(value)
        if text is None:
            raise record.make_error("answer", "has an exponent that is too large for decimal notation; write the answer as text")
        return text
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.isoformat()
    if not isinstance(value, str | int):
        raise record.make_error(
            "answer", f"must be text or a number, not {type(value).__name__}; write it as text, in the form expected in a response"
        )
    return str(value)
