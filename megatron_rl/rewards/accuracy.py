"""Whether an episode's answer is right: void answers first, then the rules, then a judge where the rules leave it open.

data_source tells which rule applies. A source that nobody knows is compared like the rest: text, choice or number, mathematics, judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.data.answers import unwrapped
from megatron_rl.rewards.algebra import Algebra
from megatron_rl.rewards.answer import NUMERIC_SOURCES, Read, decide, last_reply, relative_accuracy, unboxed, vetoes
from megatron_rl.rewards.benchmark_rules import official
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load
from megatron_rl.rewards.rubric import Outcome

MATHS_SOURCES = ("thinklite_eureka", "xince")
"""Mathematics by DeepEyes' rules (rubrics.py)."""
FAMILIES = {
    "search": ("vstar", "hrbench", "high_res", "deepeyes", "minio3", "visual_search", "visualprobe", "vl_agent"),
    "chart": ("chart", "ecd"),
    "maths": (
        *MATHS_SOURCES,
        "wemath",
        "v-interaction",
        "mathvision",
        "mathvista",
        "mathverse",
        "dynamath",
        "logicvista",
        "geometry3k",
        "geoqa",
    ),
}
"""Worked examples that the judge is shown, by how a data source begins; `general` for all others."""


@dataclass(slots=True, frozen=True)
class Accuracy:
    read: Read
    algebra: Algebra
    judge: Judge | None

    async def __call__(self, outcome: Outcome) -> float:
        """1 or 0; mean relative accuracy for numeric sources; by a published benchmark's own rules for its questions. Without a judge what
        the rules leave open is wrong. Raises InfraError."""
        answer = self.read(last_reply(outcome))
        if answer is None or any(holds(outcome) for holds in vetoes(self.read).values()):
            return 0.0
        truth = unboxed(str(outcome.payload["answer"]).strip())
        if self.judge is not None and self.judge.always_ask and answer.strip():
            return await self._ask_judge(self.judge, outcome, truth, answer)
        by = outcome.payload.get("official")
        if isinstance(by, Mapping) and (credit := official(truth, answer, by)) is not None:
            return credit
        truth, answer = unwrapped(truth), unwrapped(answer)
        question = str(outcome.payload["question"])
        if source_of(outcome).endswith(NUMERIC_SOURCES):
            return relative_accuracy(truth, answer, question=question)
        verdict = decide(truth, answer, question=question)
        if verdict is None and await self.algebra.equal(truth, answer):
            verdict = True
        if verdict is None and answer.strip() and self.judge is not None:
            return await self._ask_judge(self.judge, outcome, truth, answer)
        return float(verdict is True)

    async def _ask_judge(self, judge: Judge, outcome: Outcome, truth: str, answer: str) -> float:
        prompt = load("answer_equivalence", examples=family(source_of(outcome)))
        fields = {"question": str(outcome.payload["question"]), "reference": truth, "answer": answer}
        return await judge.judged(outcome.rollout, prompt, fields=fields)


def source_of(outcome: Outcome) -> str:
    return str(outcome.payload["data_source"]).casefold()


def family(source: str) -> str:
    return next((name for name, starts in FAMILIES.items() if source.startswith(starts)), "general")
