"""Accuracy rewards of answers without a judge, as in a run."""

import asyncio
from collections.abc import Iterable

from megatron_rl.data.answers import unwrapped
from megatron_rl.rewards.accuracy import Accuracy
from megatron_rl.rewards.algebra import Algebra
from megatron_rl.rewards.answer import tagged
from megatron_rl.rewards.rubric import Outcome
from megatron_rl.types import Turn
from tests.support.episodes import outcome_of


def rewards_of(cases: Iterable[tuple[str, str, str]], *, source: str = "") -> list[float]:
    """The rewards of (reference, reply's answer, question), all asked at once of one helper process."""

    async def ask() -> list[float]:
        accuracy = Accuracy(read=tagged, algebra=Algebra(), judge=None)
        return list(await asyncio.gather(*(accuracy(outcome(*case)) for case in cases)))

    def outcome(truth: str, answer: str, question: str) -> Outcome:
        reply = answer if "<answer>" in answer or answer.startswith("So ") else f"<answer>{answer}</answer>"
        payload = {"answer": unwrapped(truth), "question": question, "data_source": source}
        return outcome_of(Turn(sequence=0, token_span=(0, 1), text=reply), payload=payload)

    return asyncio.run(ask())
