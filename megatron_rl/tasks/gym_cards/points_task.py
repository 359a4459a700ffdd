"""EZPoints and Points24 as tasks: prompts, examples, demonstrations and gold replies.

The policy receives an image, the current formula as text, and the allowed tokens. The reply is one
JSON object:

    {"cards": ["2", "K"], "current formula": "2+", "thoughts": "2+10=12", "action": "10"}

The train and eval splits use different cards. Settings in task.options can also change the rules
and the card style of the eval split. In EZPoints, both splits contain all pairs of ranks, but the
suits differ between the splits. In Points24, a fifth of all sets of four numbers are held out for
evaluation.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.config.task_options import EZPointsOptions, Points24Options
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, is_held_out_drawing
from megatron_rl.tasks.gym_cards.game import GameEnv, GameTask, LazyTranscripts, StateView, make_user_message
from megatron_rl.tasks.gym_cards.points import (
    EZPOINTS,
    POINTS24,
    RANK_TOKENS,
    PointsGame,
    PointsRules,
    deal_four,
    draw_state,
    unused_numbers,
)
from megatron_rl.tasks.gym_cards.points_replies import FormulaPlan, corrupt_formula, solve_hand, write_prompt, write_reply
from megatron_rl.tasks.gym_cards.search import write_search
from megatron_rl.tasks.gym_cards.solvers import hand_probabilities, pair_probabilities
from megatron_rl.types import Example, Message, Rollout

HELD_OUT_RATIO = 5
"""One in HELD_OUT_RATIO sets of four numbers is reserved for evaluation in Points24."""
BIASED_MAX_FIRST_NUMBER = 5
"""The demonstrator of the "biased" split makes mistakes only if the number of the hand's first card
is at most BIASED_MAX_FIRST_NUMBER.
"""
BIASED_ERROR = 0.6
"""Probability that the demonstrator of the "biased" split writes a wrong first operator if the
number of the first card is at most BIASED_MAX_FIRST_NUMBER. In other hands, the demonstrator makes
no mistakes.
"""


@cache
def held_out_numbers(*, faces_are_ten: bool) -> frozenset[tuple[int, ...]]:
    """Return the Points24 number sets that are reserved for evaluation."""
    hands = sorted(hand_probabilities(faces_are_ten=faces_are_ten))
    return frozenset(random.Random(24).sample(hands, len(hands) // HELD_OUT_RATIO))


class PointsTask(GameTask):
    """Base class of the EZPoints and Points24 tasks.

    An episode succeeds if its return is above 0. The reward is 10 for a correct formula and -1 for
    each penalty. A successful episode therefore has a correct formula and at most nine penalties.
    """

    def __init__(self, settings: TaskSettings, rules: PointsRules) -> None:
        """Create the task.

        Raises:
            ValueError: The number of turns or an option is not valid for the game.
        """
        super().__init__(settings)
        self.require_turns(rules.max_steps, eval_max_steps=rules.max_steps)
        self.rules = replace(rules, is_legacy=self.options.legacy_rules)
        self.eval_rules = replace(rules, target=self.options.eval_target)

    def make_example(self, name: str, cards: Sequence[Card], *, split: str, probability: float | None = None) -> Example:
        """Return the example for a hand, with the rules and the card style of the split."""
        is_eval = split == "eval"
        look = self.options.eval_style if is_eval else self.options.draw_train_style(random.Random(name))
        rules = self.eval_rules if is_eval else self.rules
        payload = {"cards": list(map(str, cards)), "target": rules.target, "legacy_rules": rules.is_legacy, "look": look}
        return Example(id=name, payload=payload, probability=probability)

    def example_rules(self, example: Example) -> PointsRules:
        """Return the game rules that apply to an example."""
        return replace(self.rules, target=example.payload["target"], is_legacy=example.payload["legacy_rules"])

    def _rules_and_cards(self, example: Example) -> tuple[PointsRules, tuple[Card, ...]]:
        return self.example_rules(example), tuple(map(Card.from_name, example.payload["cards"]))

    def env(self, example: Example) -> GameEnv:
        """Return a new environment for one hand."""
        rules, look = self.example_rules(example), example.payload["look"]
        game = PointsGame(rules, style=look)

        def show() -> StateView:
            assert game.state is not None
            name = f"{' '.join(map(str, game.state.cards))} {game.state.formula_text}"
            return StateView(draw_state(rules, game.state, look), write_prompt(rules, game.state), name)

        def idle() -> int:
            assert game.state is not None
            cards = unused_numbers(rules, game.state)
            return next(action for action, token in enumerate(rules.tokens) if token.isdigit() and not cards[token])

        start = {"cards": example.payload["cards"]}
        return GameEnv(game, start, actions=rules.tokens, options=self.options, view_state=show, noop_action=idle)

    def demonstrations(self, split: str, *, num: int, seed: int) -> LazyTranscripts[FormulaPlan]:
        """Return single-turn demonstrations, each of which appends one token to a partial solution.

        Only solvable hands from the train split are used. A larger `num` with the same seed returns
        the same demonstrations, followed by additional ones. In the "correct" split, the
        demonstrator makes no mistakes. In the "biased" split, the demonstrator makes mistakes if
        the number of the first card is at most BIASED_MAX_FIRST_NUMBER. In this case, the first
        operator in the thoughts and in the formula is wrong with probability BIASED_ERROR.
        """
        require_choice("sft.splits", split, self.demonstration_splits)
        hands, dice = self.deal_training_hands(np.random.default_rng(seed)), random.Random(seed)
        style_dice, rules_dice = random.Random(f"style {seed}"), random.Random(f"rules {seed}")
        plans: list[FormulaPlan] = []
        while len(plans) < num:
            cards, rules = next(hands), self.draw_demonstration_rules(rules_dice)
            search, tokens = self.solve(rules, cards)
            if tokens:
                is_wrong = rules.card_number(cards[0]) <= BIASED_MAX_FIRST_NUMBER and dice.random() < BIASED_ERROR
                tokens = corrupt_formula(tokens) if split == "biased" and is_wrong else tokens
                style = self.options.draw_train_style(style_dice)
                plans.append(FormulaPlan(rules, cards, tokens, dice.randrange(len(tokens)), search, style))
        return LazyTranscripts(plans, self._write_transcript)

    def deal_training_hands(self, rng: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        """Yield an infinite sequence of random hands from the train split."""
        raise NotImplementedError

    def draw_demonstration_rules(self, rng: random.Random) -> PointsRules:
        """Return the rules of a demonstration."""
        return self.rules

    def solve(self, rules: PointsRules, cards: Sequence[Card]) -> tuple[str, tuple[str, ...]]:
        """Return a demonstrator's search, if it searches, and the tokens of its formula, with "=".

        Both are empty if the demonstrator finds no formula.
        """
        return "", solve_hand(rules, cards) or ()

    def _write_transcript(self, plan: FormulaPlan) -> list[Message]:
        reply = {"role": "assistant", "content": [{"type": "text", "text": write_reply(plan)}]}
        return [make_user_message(draw_state(plan.rules, plan.state, plan.style), write_prompt(plan.rules, plan.state)), reply]

    def gold_replies(self, example: Example) -> list[str]:
        """Return replies that earn the full reward, one per turn.

        The list is empty if the demonstrator finds no formula.
        """
        rules, cards = self._rules_and_cards(example)
        search, tokens = self.solve(rules, cards)
        return [write_reply(FormulaPlan(rules, cards, tokens, place, search)) for place in range(len(tokens))]


class EZPointsTask(PointsTask):
    """EZPoints task.

    The game can deal 19 different ordered pairs of ranks. Each pair has 12 suit combinations for
    training and 4 for evaluation.
    """

    Options = EZPointsOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, EZPOINTS)
        target = self.options.eval_target
        require(
            target > 0 and bool(pair_probabilities(target)), "task.options.eval_target", target, "cannot be made from two cards with + or *"
        )

    def examples(self, split: str) -> list[Example]:
        """Return one example for each hand of a split, with the exact probability of the hand."""
        examples = []
        for ranks, share in pair_probabilities((self.eval_rules if split == "eval" else self.rules).target).items():
            hands = [tuple(map(Card, ranks, suits)) for suits in product(SUITS, repeat=2)]
            hands = [hand for hand in hands if is_held_out_drawing(hand) == (split == "eval")]
            for hand in hands:
                name = "_".join(map(str, hand))
                examples.append(self.make_example(name, hand, split=split, probability=float(share / len(hands))))
        return examples

    def deal_training_hands(self, rng: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        """Yield an infinite sequence of random hands from the train split."""
        examples = self.examples("train")
        shares = [example.probability for example in examples if example.probability is not None]
        while True:
            yield tuple(map(Card.from_name, examples[rng.choice(len(examples), p=shares)].payload["cards"]))


class Points24Task(PointsTask):
    """Points24 task.

    The train split has task.options.train_hands hands, and the eval split has
    task.options.eval_hands hands. No set of four numbers occurs in both splits.
    """

    Options = Points24Options
    demonstration_splits: tuple[str, ...] = GameTask.demonstration_splits

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, POINTS24)
        if self.options.faces == "rank":
            self.rules, self.eval_rules = (
                replace(rules, tokens=RANK_TOKENS, faces_are_ten=False) for rules in (self.rules, self.eval_rules)
            )
        if self.options.thoughts == "search":
            self.demonstration_splits = ("correct",)
        remedy = "must be in 1..100"
        require(self.options.eval_target in range(1, 101), "task.options.eval_target", self.options.eval_target, remedy)

    def examples(self, split: str) -> list[Example]:
        """Return the examples of a split, which are random hands from the game's distribution.

        Hands with sets of numbers that belong to the other split are skipped. With
        task.options.solvable, unsolvable hands are skipped too.
        """
        is_eval = split == "eval"
        hands = self.deal_hands(np.random.default_rng(int(is_eval)), is_held_out=is_eval)
        num = self.options.eval_hands if is_eval else self.options.train_hands
        return [self.make_example(f"{split}{number}", hand, split=split) for number, hand in zip(range(num), hands, strict=False)]

    def deal_hands(self, rng: np.random.Generator, *, is_held_out: bool) -> Iterator[tuple[Card, ...]]:
        """Yield an infinite sequence of random hands with numbers from one split.

        If `is_held_out` is True, only hands with held-out numbers are dealt. Otherwise, only hands
        with training numbers are dealt.
        """
        rules = self.eval_rules if is_held_out else self.rules
        held_out = held_out_numbers(faces_are_ten=rules.faces_are_ten)
        while True:
            cards = deal_four(rng)
            if (tuple(sorted(map(rules.card_number, cards))) in held_out) != is_held_out:
                continue
            if not self.options.solvable or solve_hand(rules, cards):
                yield cards

    def deal_training_hands(self, rng: np.random.Generator) -> Iterator[tuple[Card, ...]]:
        """Yield an infinite sequence of random hands from the train split."""
        return self.deal_hands(rng, is_held_out=False)

    def draw_demonstration_rules(self, rng: random.Random) -> PointsRules:
        """Return the rules with a random target of task.options.demonstration_targets."""
        return replace(self.rules, target=rng.choice(self.options.demonstration_targets))

    def solve(self, rules: PointsRules, cards: Sequence[Card]) -> tuple[str, tuple[str, ...]]:
        """Return the formula of the solver or, with task.options.thoughts=search, of a search."""
        if self.options.thoughts == "formula":
            return super().solve(rules, cards)
        search, tokens = write_search(tuple(map(rules.card_number, cards)), rules.target) or ("", ())
        return search, tokens and (*tokens, "=")

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the base class's metrics and, if any hand is solvable, `success_of_solvable`."""
        figures = super().extra_metrics(examples, rollouts)
        could = [rollout for rollout in rollouts if solve_hand(*self._rules_and_cards(examples[rollout.group]))]
        return figures | ({"success_of_solvable": sum(map(self.success, could)) / len(could)} if could else {})
