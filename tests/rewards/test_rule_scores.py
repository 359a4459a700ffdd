"""Tests the score of an answer by the rules alone: right, wrong, undecided, and which of these a judge
may overrule. The cases are those of docs/answers.md and docs/evaluation.md.
"""

import asyncio

from megatron_rl.rewards.accuracy import RuleScore, score_by_rules
from megatron_rl.rewards.algebra import MathVerifier

PAYLOAD = {"question": "What is it?", "data_source": "mine"}
CASES = [
    ({"answer": "\\boxed{12}"}, "The answer is 12.", RuleScore(1.0, is_final=True)),
    ({"answer": "12"}, "13", RuleScore(0.0, is_final=True)),
    ({"answer": "3x"}, "x\\cdot 3", RuleScore(1.0, is_final=True)),
    ({"answer": "3x"}, "3y", RuleScore(0.0, is_final=False)),
    ({"answer": "a dog"}, "a hound", RuleScore(None, is_final=False)),
    ({"answer": "100", "data_source": "VSI_numerical"}, "88", RuleScore(0.8, is_final=True)),
    ({"answer": "B", "official": {"benchmark": "vstar", "options": ("red", "blue")}}, "red", RuleScore(0.0, is_final=True)),
    ({"answer": "B", "official": {"benchmark": "vstar", "options": ("red", "blue")}}, "green", RuleScore(None, is_final=False)),
]


def test_scores_by_the_rules() -> None:
    verifier = MathVerifier()

    async def scores() -> list[RuleScore]:
        return [await score_by_rules({**PAYLOAD, **row}, answer, verifier) for row, answer, _ in CASES]

    assert asyncio.run(scores()) == [expected for _, _, expected in CASES]
