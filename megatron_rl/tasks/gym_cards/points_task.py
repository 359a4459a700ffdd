"""EZPoints and Points24 as tasks: prompts, examples, demonstrations and the replies that earn full marks.

The policy sees the picture, the formula as text and the tokens that it may append, and replies with one JSON object, e.g.
    {"cards": ["2", "K"], "current formula": "2+", "thoughts": "2+10=12", "action": "10"}
Beside what the options change in evaluations, train and eval differ in the cards: EZPoints has all its hands in both, drawn with suits that
the other has not; Points24 holds a fifth of all four numbers out.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, drawing_is_held_out
from megatron_rl.tasks.gym_cards.game import GameEnv, GameTask, Shown, Transcripts, asked
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24, RANK_TOKENS, Points, Rules, Table, deal_four, picture, unused
from megatron_rl.tasks.gym_cards.solvers import hands_of_four, solution, solution_of_pair, starts_of_pairs
from megatron_rl.tasks.task_options import EZPointsOptions, Points24Options
from megatron_rl.types import Example, Message, Rollout

HELD_OUT = 5
"""One in so many of the four numbers of Points24 is for evaluation."""
BIASED_FIRST = 5
"""In split "biased" the demonstrator mistakes the formula's first sign in hands whose first card counts at most this..."""
BIASED_ERROR = 0.6
"""...with this probability, and never elsewhere."""
MISTAKEN = {"+": "*", "*": "+", "-": "+", "/": "*"}


def prompt_of(rules: Rules, table: Table) -> str:
    name, faces = ("EZPoints", "10") if rules.num_cards == 2 else ("Points24", "10" if rules.faces_are_ten else "11, 12 and 13")
    return (
        f"{name}: write a formula that makes {rules.target} and uses each card once; J, Q and K count {faces}. "
        f'Current formula: "{table.text}". Append one of {" ".join(rules.tokens)}, of which = is the end. '
        'Answer with one JSON object: {"cards": list of text, "current formula": text, "thoughts": text, "action": text}'
    )


def solved(rules: Rules, cards: Sequence[Card]) -> tuple[str, ...] | None:
    """The tokens that win, "=" included, or None where the hand has no solution."""
    numbers: Any = tuple(map(rules.number, cards))
    found = (solution_of_pair if rules.num_cards == 2 else solution)(numbers, rules.target)
    return found and (*found, "=")


class Plan(NamedTuple):
    """A formula to write for a hand, "=" included, of which so many tokens stand already."""

    cards: tuple[Card, ...]
    tokens: tuple[str, ...]
    place: int

    @property
    def table(self) -> Table:
        return Table(self.cards, self.tokens[: self.place])


def write_reply(rules: Rules, plan: Plan) -> str:
    """The reply that reads the state right, has the whole formula in mind and appends its next token."""
    symbols, thoughts = [card.symbol for card in plan.cards], "".join(plan.tokens) + str(rules.target)
    action = plan.tokens[plan.place]
    return json.dumps({"cards": symbols, "current formula": plan.table.text, "thoughts": thoughts, "action": action})


def mistaken(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The formula with another first sign; of two cards that makes another number. Example: 3 * 9 = for 3 + 9 =."""
    place = next(place for place, token in enumerate(tokens) if token in MISTAKEN)
    return (*tokens[:place], MISTAKEN[tokens[place]], *tokens[place + 1 :])


@cache
def held_out_numbers(*, faces_are_ten: bool) -> frozenset[tuple[int, ...]]:
    """The four numbers of Points24 that only evaluations see."""
    hands = sorted(hands_of_four(faces_are_ten=faces_are_ten))
    return frozenset(random.Random(24).sample(hands, len(hands) // HELD_OUT))


class PointsTask(GameTask):
    """What both tasks are. An episode succeeds when its return is above 0: the target made, at fewer than ten penalties."""

    def __init__(self, settings: TaskSettings, rules: Rules) -> None:
        """ValueError: a number of turns or an option that the game does not take."""
        super().__init__(settings)
        self.require_turns(rules.max_steps, eval_max_steps=rules.max_steps)
        self.rules = replace(rules, is_legacy=self.options.legacy_rules)
        self.eval_rules = replace(rules, target=self.options.eval_target)

    def example_of(self, name: str, cards: Sequence[Card], *, split: str, probability: float | None = None) -> Example:
        is_eval = split == "eval"
        look = (self.options.eval_art, self.options.eval_card_scale) if is_eval else ("large", 1.0)
        rules = self.eval_rules if is_eval else self.rules
        payload = {"cards": list(map(str, cards)), "target": rules.target, "legacy_rules": rules.is_legacy, "look": look}
        return Example(id=name, payload=payload, probability=probability)

    def rules_of(self, example: Example) -> Rules:
        return replace(self.rules, target=example.payload["target"], is_legacy=example.payload["legacy_rules"])

    def env(self, example: Example) -> GameEnv:
        rules, look = self.rules_of(example), example.payload["look"]
        game = Points(rules, look=look)

        def show() -> Shown:
            assert game.table is not None
            name = f"{' '.join(map(str, game.table.cards))} {game.table.text}"
            return Shown(picture(rules, game.table, look), prompt_of(rules, game.table), name)

        def idle() -> int:
            assert game.table is not None
            cards = unused(rules, game.table)
            return next(action for action, token in enumerate(rules.tokens) if token.isdigit() and not cards[token])

        start = {"cards": example.payload["cards"]}
        return GameEnv(game, start, actions=rules.tokens, options=self.options, show=show, idle=idle)

    def demonstrations(self, split: str, *, num: int, seed: int) -> Transcripts[Plan]:
        """Single turns on the way to a solution, in hands of split train that have one. Fewer are a prefix of more.

        split "correct" is never mistaken; "biased" is, with probability BIASED_ERROR where the first card counts at most BIASED_FIRST: it
        thinks and writes the wrong sign.
        """
        require_choice("sft.splits", split, ("correct", "biased"))
        hands, dice = self.training_hands(np.random.default_rng(seed)), random.Random(seed)
        plans: list[Plan] = []
        while len(plans) < num:
            cards = next(hands)
            tokens = solved(self.rules, cards)
            if tokens:
                is_wrong = self.rules.number(cards[0]) <= BIASED_FIRST and dice.random() < BIASED_ERROR
                tokens = mistaken(tokens) if split == "biased" and is_wrong else tokens
                plans.append(Plan(cards, tokens, dice.randrange(len(tokens))))
        return Transcripts(plans, self._transcript)

    def training_hands(self, dice: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        """Hands as split train has them, without end."""
        raise NotImplementedError

    def _transcript(self, plan: Plan) -> list[Message]:
        reply = {"role": "assistant", "content": [{"type": "text", "text": write_reply(self.rules, plan)}]}
        return [asked(picture(self.rules, plan.table), prompt_of(self.rules, plan.table)), reply]

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks, turn by turn; none where the hand has no solution."""
        rules, cards = self.rules_of(example), tuple(map(Card.named, example.payload["cards"]))
        tokens = solved(rules, cards) or ()
        return [write_reply(rules, Plan(cards, tokens, place)) for place in range(len(tokens))]


class EZPointsTask(PointsTask):
    """EZPoints: 19 hands of two ranks in their order, each in twelve drawings to train on and in four to evaluate on."""

    Options = EZPointsOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, EZPOINTS)
        target = self.options.eval_target
        require(target > 0 and bool(starts_of_pairs(target)), "task.options.eval_target", target, "no two cards make it by + or *")

    def examples(self, split: str) -> list[Example]:
        """All hands, with their exact probabilities in the split."""
        examples = []
        for ranks, share in starts_of_pairs((self.eval_rules if split == "eval" else self.rules).target).items():
            hands = [tuple(map(Card, ranks, suits)) for suits in product(SUITS, repeat=2)]
            hands = [hand for hand in hands if drawing_is_held_out(hand) == (split == "eval")]
            for hand in hands:
                name = "_".join(map(str, hand))
                examples.append(self.example_of(name, hand, split=split, probability=float(share / len(hands))))
        return examples

    def training_hands(self, dice: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        examples = self.examples("train")
        shares = [example.probability for example in examples]
        while True:
            yield tuple(map(Card.named, examples[dice.choice(len(examples), p=shares)].payload["cards"]))


class Points24Task(PointsTask):
    """Points24: as many dealt hands as task.options say, of numbers that only their split has."""

    Options = Points24Options

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, POINTS24)
        if self.options.faces == "rank":
            self.rules, self.eval_rules = (
                replace(rules, tokens=RANK_TOKENS, faces_are_ten=False) for rules in (self.rules, self.eval_rules)
            )
        remedy = "must be in 1..100"
        require(self.options.eval_target in range(1, 101), "task.options.eval_target", self.options.eval_target, remedy)

    def examples(self, split: str) -> list[Example]:
        """Dealt as the game deals, but for what the other split has; with task.options.solvable, only what has a solution."""
        is_eval = split == "eval"
        hands = self.hands(np.random.default_rng(int(is_eval)), is_held_out=is_eval)
        num = self.options.eval_hands if is_eval else self.options.train_hands
        return [self.example_of(f"{split}{number}", hand, split=split) for number, hand in zip(range(num), hands, strict=False)]

    def hands(self, dice: np.random.Generator, *, is_held_out: bool) -> Iterator[tuple[Card, ...]]:
        rules = self.eval_rules if is_held_out else self.rules
        held_out = held_out_numbers(faces_are_ten=rules.faces_are_ten)
        while True:
            cards = deal_four(dice)
            if (tuple(sorted(map(rules.number, cards))) in held_out) != is_held_out:
                continue
            if not self.options.solvable or solved(rules, cards):
                yield cards

    def training_hands(self, dice: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        return self.hands(dice, is_held_out=False)

    def figures(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Success among the hands that have a solution, if any has."""
        figures = super().figures(examples, rollouts)
        could = [rollout for rollout in rollouts if self.gold(examples[rollout.group])]
        return figures | ({"success_of_solvable": sum(map(self.success, could)) / len(could)} if could else {})
