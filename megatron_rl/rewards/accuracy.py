"""Accuracy reward for tasks with questions.

A vetoed answer scores 0. Any other answer is compared with the ground truth by rules. If the rules
leave the answer undecided, a judge decides. The example's `data_source` selects the rule. For an
unknown data source, the rules compare the answer with the ground truth as text, as a choice, as a
label, as a number, and as a mathematical expression, in this order.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_rl.data.answers import extract_answer
from megatron_rl.errors import AccessDenied, InfraError
from megatron_rl.rewards.algebra import MathVerifier
from megatron_rl.rewards.answer import (
    NUMERIC_SOURCES,
    AnswerReader,
    compare_by_rules,
    get_last_reply,
    make_answer_vetoes,
    mean_relative_accuracy,
    strip_box,
)
from megatron_rl.rewards.benchmark_rules import score_by_benchmark
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load_judge_prompt
from megatron_rl.rewards.rubric import RewardInput

MATHS_SOURCES = ("thinklite_eureka", "xince")
"""Prefixes of the data sources that DeepEyes' reward treats as mathematics (rubrics.py)."""
EXAMPLE_FAMILIES = {
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
"""Maps each family of worked examples for the judge's prompt to the prefixes of its data sources;
all other sources use the family `general`.
"""
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class AccuracyReward:
    """Reward in [0, 1] for the correctness of an answer, determined by rules or a judge."""

    read_answer: AnswerReader
    math_verifier: MathVerifier
    judge: Judge | None
    get_reply: Callable[[RewardInput], str] = get_last_reply
    """Returns the text that contains the answer."""

    async def __call__(self, reward_input: RewardInput) -> float:
        """Return 1 for a correct answer and 0 for a wrong answer.

        Two kinds of questions can have rewards between 0 and 1. Questions from numeric data sources
        are scored by mean relative accuracy. Questions from a published benchmark are scored by the
        benchmark's own rule. Without a judge, an answer that the rules leave
        undecided is wrong. In an audit, rules and judge both decide, and the reward is the same as
        without the audit; a failure of the one that is only compared leaves the audit out.

        Raises:
            InfraError: The judge or the math verifier failed.
        """
        answer = self.read_answer(self.get_reply(reward_input))
        if answer is None or any(holds(reward_input) for holds in make_answer_vetoes(self.read_answer, self.get_reply).values()):
            return 0.0
        payload, judge = reward_input.payload, self.judge
        is_audited = judge is not None and judge.is_audited(reward_input.rollout)
        if judge is not None and judge.always_ask and answer.strip():
            rules = await _or_none(score_by_rules(payload, answer, self.math_verifier)) if is_audited else None
            return await _ask_judge(judge, reward_input, _reference(payload), answer, rules=rules)
        found = await score_by_rules(payload, answer, self.math_verifier)
        truth, answer = extract_answer(_reference(payload)), extract_answer(answer)
        if judge is not None and answer.strip() and not found.is_final:
            return await _ask_judge(judge, reward_input, truth, answer)
        if judge is not None and answer.strip() and is_audited:
            await _or_none(_ask_judge(judge, reward_input, truth, answer, rules=found, is_reward=False))
        return found.credit or 0.0


@dataclass(slots=True, frozen=True)
class RuleScore:
    """Score of an answer by the rules."""

    credit: float | None
    """Score from 0 to 1, or None if the rules leave the answer undecided."""
    is_final: bool
    """False if a judge, where there is one, decides instead.

    This is the case for undecided answers, and for answers that differ from the truth only
    according to math-verify.
    """


async def score_by_rules(payload: Mapping[str, object], answer: str, math_verifier: MathVerifier) -> RuleScore:
    """Score an answer by the rules alone, without vetoes and judge.

    Args:
        payload: Payload of the question (data/questions.py).
        answer: Answer extracted from the reply.
        math_verifier: Compares answers that the other rules leave undecided.

    Raises:
        InfraError: The math verifier failed.
    """
    truth, by = _reference(payload), payload.get("official")
    if isinstance(by, Mapping) and (credit := score_by_benchmark(truth, answer, by)) is not None:
        return RuleScore(credit, is_final=True)
    truth, answer, question = extract_answer(truth), extract_answer(answer), str(payload["question"])
    if get_data_source(payload).endswith(NUMERIC_SOURCES):
        return RuleScore(mean_relative_accuracy(truth, answer, question=question), is_final=True)
    verdict = compare_by_rules(truth, answer, question=question)
    if verdict is not None:
        return RuleScore(float(verdict), is_final=True)
    is_equal = await math_verifier.is_equal(truth, answer)
    return RuleScore(None if is_equal is None else float(is_equal), is_final=is_equal is True)


async def _ask_judge(
    judge: Judge, reward_input: RewardInput, truth: str, answer: str, *, rules: RuleScore | None = None, is_reward: bool = True
) -> float:
    prompt = load_judge_prompt("answer_equivalence", examples=find_example_family(get_data_source(reward_input.payload)))
    fields = {"question": str(reward_input.payload["question"]), "reference": truth, "answer": answer}
    rule_score = rules.credit if rules is not None and rules.is_final else None
    return await judge.score_rollout(reward_input.rollout, prompt, fields=fields, rule_score=rule_score, is_reward=is_reward)


async def _or_none(scored: Awaitable[T]) -> T | None:
    """Return a score that only an audit needs, or None if the infrastructure failed.

    Raises:
        AccessDenied: A server rejected the run's key, which would reject all other requests, too.
    """
    try:
        return await scored
    except AccessDenied:
        raise
    except InfraError:
        return None


def get_data_source(payload: Mapping[str, object]) -> str:
    """Return the data source of the example, case-folded; empty if the payload has none."""
    return str(payload.get("data_source", "")).casefold()


def _reference(payload: Mapping[str, object]) -> str:
    return strip_box(str(payload["answer"]).strip())


def find_example_family(source: str) -> str:
    """Return the family of worked examples for a data source."""
    return next((name for name, starts in EXAMPLE_FAMILIES.items() if source.startswith(starts)), "general")
