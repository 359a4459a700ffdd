"""Counts at which stage the responses of a Points24 policy fail, from reading to writing.

    python launch/evaluate.py experiment=points24_ppo_cpu model.path=runs/points24/sft/final run.dir=runs/points24/eval
    python benchmarks/points24_errors.py runs/points24/eval/rollouts

Reads the recorded rollouts of evaluations and prints a table of the first mistake in each reply
with thoughts in the form of task.options.thoughts=search. The stages are, in this order:

- invalid: the reply is no JSON object with the four fields, or the thoughts have another form.
- reading: `cards` or `current formula` differ from the picture.
- numbers: the numbers at the start of the search are not those of the cards.
- arithmetic: a move of the search has a wrong result, or wrong remaining numbers.
- verdict: the search says wrongly that the target can or cannot be made from the remaining numbers.
- formula: the formula after the search is not 24 with the hand's numbers.
- continuation: the formula does not begin with the current formula and the action.

Only hands that a search solves are counted. "all turns" has every reply of these episodes, "first
turns" one reply per episode.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from megatron_rl.tasks.gym_cards.cards import Card
from megatron_rl.tasks.gym_cards.expressions import evaluate
from megatron_rl.tasks.gym_cards.search import can_make

STAGES = ("invalid", "reading", "numbers", "arithmetic", "verdict", "formula", "continuation", "right")
MOVE = re.compile(r" (\d+)([-+*/])(\d+)=(\d+)((?: \d+)*)( [yn])?\.")
TOKEN = re.compile(r"\d+|[-+*/()]")


def find_first_mistake(cards: tuple[Card, ...], formula: str, reply: str, *, target: int = 24) -> str:
    """Return the first stage at which a reply is wrong, or "right".

    Args:
        cards: Cards of the hand.
        formula: Formula in the picture.
        reply: Text of the reply.
        target: Number to make.
    """
    try:
        read = json.loads(reply)
        thoughts, action = read["thoughts"], read["action"]
        search, plan = thoughts.rsplit(". ", 1)
        start, moves = f"{search}.".split(":", 1)
        listed = tuple(map(int, start.split()))
        shown = (read["cards"], read["current formula"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "invalid"
    numbers = tuple(sorted((card.value for card in cards), reverse=True))
    if shown != ([card.symbol for card in cards], formula):
        return "reading"
    if listed != numbers:
        return "numbers"
    mistake = _check_moves(numbers, moves, target)
    if mistake:
        return mistake
    tokens = TOKEN.findall(plan.removesuffix(f"={target}"))
    is_formula = "".join(tokens) + f"={target}" == plan and evaluate(tokens) == target
    if not is_formula or sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
        return "formula"
    return "right" if f"{''.join(tokens)}=".startswith(f"{formula}{action}") and action in (*tokens, "=") else "continuation"


def _check_moves(state: tuple[int, ...], moves: str, target: int) -> str:
    """Return the first stage at which a move is wrong, or an empty string."""
    found = list(MOVE.finditer(moves))
    if "".join(match.group(0) for match in found) != moves:
        return "invalid"
    for match in found:
        left, operator, right, value, listed, verdict = match.groups()
        rest = Counter(state)
        rest.subtract(map(int, (left, right)))
        after = tuple(sorted([*rest.elements(), int(value)], reverse=True))
        if min(rest.values()) < 0 or evaluate((left, operator, right)) != int(value):
            return "arithmetic"
        if tuple(map(int, listed.split())) != (after if len(after) > 1 else ()):
            return "arithmetic"
        if (verdict != " n") != can_make(after, target):
            return "verdict"
        state = state if verdict == " n" else after
    return "" if state == (target,) else "verdict"


def count_mistakes(folder: Path) -> dict[str, Counter[str]]:
    """Return the number of replies per stage, for all turns and for first turns.

    Raises:
        ValueError: The folder has no recorded rollouts of an evaluation.
    """
    counts: dict[str, Counter[str]] = {"all turns": Counter(), "first turns": Counter()}
    files = sorted(folder.glob("step_*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: has no step_*.jsonl; use the folder rollouts of launch/evaluate.py")
    for line in (line for path in files for line in path.read_text().splitlines()):
        for number, turn in enumerate(json.loads(line)["rollout"]["turns"]):
            *names, formula = turn["state"].split(" ", 4)
            cards = tuple(map(Card.from_name, names))
            if can_make(tuple(sorted((card.value for card in cards), reverse=True)), 24):
                stage = find_first_mistake(cards, formula, turn["text"])
                counts["all turns"][stage] += 1
                counts["first turns"][stage] += not number
    return counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder `rollouts` of an evaluation")
    counts = count_mistakes(parser.parse_args().folder)
    print("| replies | number |" + "".join(f" {stage} |" for stage in STAGES) + "\n" + "|---" * (2 + len(STAGES)) + "|")
    for name, found in counts.items():
        total = found.total()
        print(f"| {name} | {total} |" + "".join(f" {100 * found[stage] / max(total, 1):.1f}% |" for stage in STAGES))


if __name__ == "__main__":
    main()
