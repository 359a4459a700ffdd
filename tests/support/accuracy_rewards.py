"""Computes accuracy rewards without a judge, as in a run."""

import asyncio
from collections.abc import Iterable

from megatron_rl.data.answers import extract_answer
from megatron_rl.rewards.accuracy import AccuracyReward
from megatron_rl.rewards.algebra import MathVerifier
from megatron_rl.rewards.answer import read_tagged
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.types import Turn
from tests.support.rollout_factory import make_reward_input


def compute_rewards(cases: Iterable[tuple[str, str, str]], *, source: str = "") -> list[float]:
    """Return the rewards of (reference, answer in the response, question).

    One helper process verifies all of them concurrently.
    """

    async def ask() -> list[float]:
        accuracy = AccuracyReward(read_answer=read_tagged, math_verifier=MathVerifier(), judge=None)
        return list(await asyncio.gather(*(accuracy(outcome(*case)) for case in cases)))

    def outcome(truth: str, answer: str, question: str) -> RewardInput:
        reply = answer if "<answer>" in answer or answer.startswith("So ") else f"<answer>{answer}</answer>"
        payload = {"answer": extract_answer(truth), "question": question, "data_source": source}
        return make_reward_input(Turn(sequence=0, token_span=(0, 1), text=reply), payload=payload)

    return asyncio.run(ask())
