"""Answers: extraction from replies, vetoes, and rules that compare an answer with the truth.

Formats and constants follow PyVision-RL (strict boxed answer, mean relative accuracy, 1000
characters), CodeV and DeepEyes (tagged answer). Every rule works on the extracted answer; the rest
of the reply is never scored. Replies are untrusted, so every regular expression in this module is
matched in time linear in the length of the reply.
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
"""Returns the answer in an episode's last reply, or None if the reply has no answer in the required
format.
"""
NUMERIC_SOURCES = ("vsi_numerical", "rule_verifiable")
"""Suffixes of the data sources that are scored by mean relative accuracy."""
MRA_THRESHOLDS = tuple(Fraction(percent, 100) for percent in range(50, 100, 5))
"""Thresholds of mean relative accuracy: 0.50, 0.55, ..., 0.95 (Yang et al. 2024, "Thinking in
Space", section 3).
"""
_OPEN, _CLOSE = "<answer>", "</answer>"


def read_strict_boxed(reply: str) -> str | None:
    r"""Return the content of the last `<answer>\n\boxed{...}\n</answer>`, or None.

    The braces must be balanced, and nothing else is allowed between the tags.
    """
    _, found, body = _text_after_thinking(reply).rpartition(f"{_OPEN}\n{BOX_COMMAND}")
    inside = text_before_closing_brace(body) if found else None
    return inside if inside is not None and body[len(inside) :].startswith(f"}}\n{_CLOSE}") else None


def read_tagged(reply: str) -> str | None:
    r"""Return the content of the last <answer> block after the last </think>, without \boxed{}.

    If there is no <answer> block, return the content of the last \boxed{}. If the reply has
    neither, return its final answer in GSM8K's format (`#### 18`).
    """
    spoken = _text_after_thinking(reply)
    blocks = _answer_blocks(spoken)
    return strip_box(blocks[-1].strip()) if blocks else extract_last_box(spoken)


def get_last_reply(reward_input: RewardInput) -> str:
    """Return the text of the last turn, or an empty string if there are no turns."""
    return reward_input.turns[-1].text if reward_input.turns else ""


def make_answer_vetoes(read_answer: AnswerReader, get_reply: Callable[[RewardInput], str] = get_last_reply) -> dict[str, VetoFn]:
    """Return the veto checks for answers, keyed by name; a veto removes all positive rewards.

    `get_reply` returns the text that contains the answer.
    """

    def long_answer(outcome: RewardInput) -> bool:
        return len(read_answer(get_reply(outcome)) or "") >= MAX_ANSWER_CHARS

    def two_answers(outcome: RewardInput) -> bool:
        spoken = _text_after_thinking(get_reply(outcome))
        if _OPEN in spoken or _CLOSE in spoken:
            return max(spoken.count(_OPEN), spoken.count(_CLOSE)) > 1
        return count_boxes(spoken) > 1

    def tags_in_answer(outcome: RewardInput) -> bool:
        return PROTOCOL_TAG.search(read_answer(get_reply(outcome)) or "") is not None

    return {"long_answer": long_answer, "two_answers": two_answers, "tags_in_answer": tags_in_answer}


def same_text(truth: str, answer: str) -> bool:
    """Return True if both texts are equal after normalization.

    Differences in case, formatting, whitespace, enclosing quotation marks and trailing punctuation
    are ignored. An empty text is not equal to any text.
    """
    return comparison_form(truth) == comparison_form(answer) != ""


def mean_relative_accuracy(truth: str, answer: str, *, question: str = "") -> float:
    """Return the fraction of MRA_THRESHOLDS for which the relative error is small enough.

    The answer meets a threshold t if |answer - truth| / |truth| < 1 - t. Equal texts score 1. If
    the truth is 0 or not a number, the result is 1 for an equal answer and 0 otherwise.

    Example: for truth 100 and answer 88, the relative error 0.12 is below 1 - t for the 8
    thresholds from t = 0.50 to 0.85. With 10 thresholds, the result is 0.8.
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
    """Return the verdict of the text rules, or None if the rules leave the answer undecided.

    Equal texts count as correct. Other texts are compared by value if both are of the same kind.
    The kinds are choices among the question's options, labels made of digits (such as times and
    dates), numbers, and lists of numbers.
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
    """Return True if several options (such as `BB` and `bb`) equal `text` after normalization."""
    forms = [comparison_form(option) for option in options.values()]
    return forms.count(comparison_form(text)) > 1


def _text_after_thinking(reply: str) -> str:
    return reply.rpartition("</think>")[2]


def _answer_blocks(spoken: str) -> list[str]:
    """Return the texts between answer tags.

    Each text begins at the first opening tag after the previous closing tag.
    """
    pieces = spoken.split(_CLOSE)[:-1]
    return [piece.partition(_OPEN)[2] for piece in pieces if _OPEN in piece]
