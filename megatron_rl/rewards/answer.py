r"""Answers: how they are read from a reply, what makes one void, and the rules that compare one with the truth.

Formats and constants follow PyVision-RL (strict boxed answer, mean relative accuracy, 1000 characters), CodeV and DeepEyes (tagged answer).
Every rule works on the extracted answer: what a reply says on the way to it is never scored. Replies are untrusted; every pattern here is
linear in their length.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_rl.rewards.rubric import Outcome, Veto

Read = Callable[[str], str | None]
"""The answer in an episode's last reply, or None where it has none in the format asked for."""
LONGEST = 1000
"""An answer of so many characters or more is void."""
NUMERIC_SOURCES = ("vsi_numerical", "rule_verifiable")
"""Data sources with one of these names, or a name that ends in one, are scored by mean relative accuracy."""
THRESHOLDS = tuple(Fraction(percent, 100) for percent in range(50, 100, 5))
"""Those of mean relative accuracy: 0.50, 0.55, ..., 0.95 (Yang et al. 2024, "Thinking in Space", section 3)."""
_OPEN, _CLOSE, BOX = "<answer>", "</answer>", "\\boxed{"
_TAG = re.compile(r"</?(?:answer|interpreter|code|think|tool_call|tool_response|sandbox_output)>|\\boxed|<\|", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
_CHOICE = re.compile(r"(?:\(([A-Z])\)|([A-Z])[:)])(?:\s|\Z)|([A-Z])\.?\Z")
_BARE = re.compile(r"\([A-Z]\)|[A-Z][.:)]?")
_OPTION = re.compile(r"(?:^|[\s(])([A-Z])[.:)]\s*\S", re.MULTILINE)


def strict_boxed(reply: str) -> str | None:
    r"""The inside of `<answer>\n\boxed{...}\n</answer>`, its braces balanced and nothing else between the tags. The last one counts."""
    _, found, body = _spoken(reply).rpartition(f"{_OPEN}\n{BOX}")
    inside = _balanced(body) if found else None
    return inside if inside is not None and body[len(inside) :].startswith(f"}}\n{_CLOSE}") else None


def tagged(reply: str) -> str | None:
    r"""What the last <answer> block behind the last </think> holds, out of \boxed{}; without a block, what the last \boxed{} holds."""
    spoken = _spoken(reply)
    blocks = _blocks(spoken)
    if blocks:
        return unboxed(blocks[-1].strip())
    _, found, body = spoken.rpartition(BOX)
    return _balanced(body) if found else None


def unboxed(text: str) -> str:
    r"""\boxed{x} -> x; anything else stays."""
    inside = _balanced(text.removeprefix(BOX)) if text.startswith(BOX) else None
    return inside if inside is not None and len(inside) + len(BOX) + 1 == len(text) else text


def last_reply(outcome: Outcome) -> str:
    return outcome.turns[-1].text if outcome.turns else ""


def vetoes(read: Read) -> dict[str, Veto]:
    """What makes an answer void, whatever it says: it takes every bonus with it."""

    def long_answer(outcome: Outcome) -> bool:
        return len(read(last_reply(outcome)) or "") >= LONGEST

    def two_answers(outcome: Outcome) -> bool:
        spoken = _spoken(last_reply(outcome))
        marks = (_OPEN, _CLOSE) if _OPEN in spoken or _CLOSE in spoken else (BOX,)
        return any(spoken.count(mark) > 1 for mark in marks)

    def tags_in_answer(outcome: Outcome) -> bool:
        return _TAG.search(read(last_reply(outcome)) or "") is not None

    return {"long_answer": long_answer, "two_answers": two_answers, "tags_in_answer": tags_in_answer}


def same_text(truth: str, answer: str) -> bool:
    """Equal but for case, white space, enclosing quotation marks or dollars, and a full stop at the end."""
    return _plain(truth) == _plain(answer) != ""


def choice(text: str) -> str | None:
    """The letter of `B`, `(B)`, `B.`, `B) a dog`; None for anything else (`B. Obama` is a name), and where the rest names a letter."""
    found = _CHOICE.match(text.strip())
    if not found or re.search(r"\b[A-Z]\b", text.strip()[found.end() :]):
        return None
    return next(letter for letter in found.groups() if letter)


def same_choice(truth: str, answer: str) -> bool | None:
    """Whether both choose the same letter; None where one chooses none, or where neither is the bare letter and their words differ."""
    choices = choice(truth), choice(answer)
    if None in choices:
        return None
    if any(_BARE.fullmatch(text.strip()) for text in (truth, answer)):
        return choices[0] == choices[1]
    words = [_CHOICE.sub("", text.strip(), count=1) for text in (truth, answer)]
    return True if choices[0] == choices[1] and same_text(*words) else None


def number(text: str) -> Fraction | None:
    """The one number of a text (`1,250.5 cm`, `about .5`); None with more digits beside it (`3 or 4`, `1e9`) or over 30 characters."""
    found = _NUMBER.search(text)
    alone = found and len(found[0]) <= 30 and not re.search(r"\d", text[: found.start()] + text[found.end() :])
    return Fraction(found[0].replace(",", "")) if found and alone else None


def relative_accuracy(truth: str, answer: str) -> float:
    """Mean over THRESHOLDS t of 1[ |answer - truth| / |truth| < 1 - t ]. A truth of 0 asks for equality; so does one that is no number.

    Example: truth 100, answer 88: off by 0.12, which is below 1 - t up to t = 0.85: 8 of 10 thresholds, 0.8.
    """
    if same_text(truth, answer):
        return 1.0
    wanted, given = number(truth), number(answer)
    if wanted is None or given is None:
        return float(same_choice(truth, answer) is True)
    if wanted == 0:
        return float(given == 0)
    error = abs(given - wanted) / abs(wanted)
    return sum(error < 1 - threshold for threshold in THRESHOLDS) / len(THRESHOLDS)


def lists_options(question: str) -> bool:
    """A question that names at least its options A and B, as `A. red`, `(A) red`, `A) red` or `A: red`."""
    return {"A", "B"} <= set(_OPTION.findall(question))


def decide(truth: str, answer: str, *, question: str = "") -> bool | None:
    """What the words alone decide: equal texts are right; of choices (same_choice) and of two whole numbers, equal ones; else None.

    Where the question lists options `B. red` is a choice too, which is otherwise read like `B. Obama`.
    """
    if same_text(truth, answer):
        return True
    if lists_options(question):
        truth, answer = (re.sub(r"^([A-Z])\.(?=\s)", r"\1)", text.strip()) for text in (truth, answer))
    chosen = same_choice(truth, answer)
    if chosen is not None:
        return chosen
    if _is_whole(truth) and _is_whole(answer):
        return number(truth) == number(answer)
    return None


def _spoken(reply: str) -> str:
    return reply.rpartition("</think>")[2]


def _blocks(spoken: str) -> list[str]:
    """Bodies between the tags, by their closings: every body reaches back to the opening before it, whatever tags it holds."""
    pieces = spoken.split(_CLOSE)[:-1]
    return [piece.partition(_OPEN)[2] for piece in pieces if _OPEN in piece]


def _balanced(body: str) -> str | None:
    r"""Text up to the brace that closes one opened before it; an escaped brace (`\{`) is no brace."""
    depth = 1
    for token in re.finditer(r"\\.|[{}]", body, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return body[: token.start()]
    return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip("\"'`$").rstrip(".").strip()


def _is_whole(text: str) -> bool:
    return number(text) is not None and re.fullmatch(r"[-+]?[0-9,]+", text.strip()) is not None
