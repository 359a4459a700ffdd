r"""Answers: how they are read from a reply, what makes one void, and the rules that compare one with the truth.

Formats and constants follow PyVision-RL (strict boxed answer, mean relative accuracy, 1000 characters), CodeV and DeepEyes (tagged answer).
Every rule works on the extracted answer: what a reply says on the way to it is never scored. Replies are untrusted; every pattern here is
linear in their length.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

from megatron_rl.data.answer_text import (
    BOX_COMMAND,
    comparison_form,
    count_boxes,
    ends_in_dots,
    extract_last_box,
    normalize_text,
    strip_box,
    text_before_closing_brace,
)
from megatron_rl.data.answers import MAX_ANSWER_CHARS, PROTOCOL_TAG
from megatron_rl.data.question_options import find_options
from megatron_rl.rewards.labels import same_label
from megatron_rl.rewards.letter_case import differ_in_case
from megatron_rl.rewards.multiple_choice import same_choice
from megatron_rl.rewards.numbers import parse_number, same_number, same_numbers
from megatron_rl.rewards.rubric import RewardInput, VetoFn

AnswerReader = Callable[[str], str | None]
"""The answer in an episode's last reply, or None where it has none in the format asked for."""
NUMERIC_SOURCES = ("vsi_numerical", "rule_verifiable")
"""Data sources with one of these names, or a name that ends in one, are scored by mean relative accuracy."""
MRA_THRESHOLDS = tuple(Fraction(percent, 100) for percent in range(50, 100, 5))
"""Those of mean relative accuracy: 0.50, 0.55, ..., 0.95 (Yang et al. 2024, "Thinking in Space", section 3)."""
_OPEN, _CLOSE = "<answer>", "</answer>"


def read_strict_boxed(reply: str) -> str | None:
    r"""The inside of `<answer>\n\boxed{...}\n</answer>`, its braces balanced and nothing else between the tags. The last one counts."""
    _, found, body = _text_after_thinking(reply).rpartition(f"{_OPEN}\n{BOX_COMMAND}")
    inside = text_before_closing_brace(body) if found else None
    return inside if inside is not None and body[len(inside) :].startswith(f"}}\n{_CLOSE}") else None


def read_tagged(reply: str) -> str | None:
    r"""Return what the last <answer> block behind the last </think> holds, out of \boxed{}; without a block what the last box holds.

    A reply without either may end as GSM8K's solutions do: `#### 18`.
    """
    spoken = _text_after_thinking(reply)
    blocks = _answer_blocks(spoken)
    return strip_box(blocks[-1].strip()) if blocks else extract_last_box(spoken)


def get_last_reply(reward_input: RewardInput) -> str:
    return reward_input.turns[-1].text if reward_input.turns else ""


def make_answer_vetoes(read_answer: AnswerReader) -> dict[str, VetoFn]:
    """What makes an answer void, whatever it says: it takes every bonus with it."""

    def long_answer(outcome: RewardInput) -> bool:
        return len(read_answer(get_last_reply(outcome)) or "") >= MAX_ANSWER_CHARS

    def two_answers(outcome: RewardInput) -> bool:
        spoken = _text_after_thinking(get_last_reply(outcome))
        if _OPEN in spoken or _CLOSE in spoken:
            return max(spoken.count(_OPEN), spoken.count(_CLOSE)) > 1
        return count_boxes(spoken) > 1

    def tags_in_answer(outcome: RewardInput) -> bool:
        return PROTOCOL_TAG.search(read_answer(get_last_reply(outcome)) or "") is not None

    return {"long_answer": long_answer, "two_answers": two_answers, "tags_in_answer": tags_in_answer}


def same_text(truth: str, answer: str) -> bool:
    """Return whether both are the same words: but for case, style, white space, enclosing quotation marks, a full stop at the end."""
    return comparison_form(truth) == comparison_form(answer) != ""


def mean_relative_accuracy(truth: str, answer: str, *, question: str = "") -> float:
    """Mean over THRESHOLDS t of 1[ |answer - truth| / |truth| < 1 - t ]. A truth of 0 asks for equality; so does one that is no number.

    Example: truth 100, answer 88: off by 0.12, which is below 1 - t up to t = 0.85: 8 of 10 thresholds, 0.8.
    """
    if same_text(truth, answer):
        return 1.0
    wanted, given = parse_number(truth), parse_number(answer, f"{question} {truth}")
    if wanted is None or given is None:
        return float(same_choice(truth, answer) is True)
    if wanted == 0:
        return float(given == 0)
    error = abs(given - wanted) / abs(wanted)
    return sum(error < 1 - threshold for threshold in MRA_THRESHOLDS) / len(MRA_THRESHOLDS)


def compare_by_rules(truth: str, answer: str, *, question: str = "") -> bool | None:
    """Return what the texts alone decide, None where mathematics or a judge has to.

    Equal texts are right; of two choices (with the options that the question lists), two labels of digits such as times and dates, two
    numbers and two lists of numbers the same ones are.
    """
    options = find_options(question)
    if same_text(truth, answer):
        is_exact = normalize_text(truth) == normalize_text(answer)
        if is_exact or not (_has_similar_options(truth, options) or differ_in_case(truth, answer)):
            return is_exact or same_numbers(truth, answer) is not False
    if ends_in_dots(truth) or ends_in_dots(answer):
        return None
    rules = (partial(same_choice, options=options), same_label, same_number, same_numbers)
    return next((verdict for rule in rules if (verdict := rule(truth, answer)) is not None), None)


def _has_similar_options(text: str, options: Mapping[str, str]) -> bool:
    """Return whether several options differ from a text in case or marks alone, as `BB` and `bb` do."""
    forms = [comparison_form(option) for option in options.values()]
    return forms.count(comparison_form(text)) > 1


def _text_after_thinking(reply: str) -> str:
    return reply.rpartition("</think>")[2]


def _answer_blocks(spoken: str) -> list[str]:
    """Bodies between the tags, by their closings: every body reaches back to the opening before it, whatever tags it holds."""
    pieces = spoken.split(_CLOSE)[:-1]
    return [piece.partition(_OPEN)[2] for piece in pieces if _OPEN in piece]
