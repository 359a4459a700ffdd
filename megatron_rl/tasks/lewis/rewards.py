"""The rewards of the Lewis game, as its README has them and as its code has them (Deepayan137/Lewis_Game 621d687, which differ).

Of a speaker, summed:
    accuracy   binary (readme): 1 where the listener picks the target. soft_gated (code): its reward_score there, else 0. soft_always (code,
               not by default): its reward_score
    format     readme: 1 where all three pairs of tags are there; code: 0.34, 0.33 and 0.33 for those of thinking, coarse and detailed
    length     readme: 0.1 for one sentence; code: -0.2 for more than one or fewer than 20 words, -0.1 for a phrase not of 6 to 8 words
    overlap    code alone: minus the largest ROUGE-2 of a sentence with what is said of state and location, for which the prompt then asks
Of a listener that compares pictures, summed:
    consistency 1 where its yes or no is right; weighted: that, and -1 for a wrong yes (readme: -0.7) and -0.3 for a wrong no
    selection   1 for the letter of the candidate that is meant
    heard       1 for the right one of yes and no, and nothing else said
    format      1 for one fenced JSON object with Reasoning and Answer
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_rl.rewards.rubric import Outcome, Part, Reward, Rubric
from megatron_rl.tasks.lewis.description import described, rouge_2, sentences, tag_pairs
from megatron_rl.tasks.lewis.listener_client import ListenerClient, Shown
from megatron_rl.tasks.lewis.listener_protocol import Heard

TAG_PAIRS = (0.34, 0.33, 0.33)
FALSE_YES, FALSE_NO = {"readme": -0.7, "code": -1.0}, -0.3
_FENCED = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)

Hear = Callable[[Outcome], Awaitable[Heard | None]]
"""What the listener made of a reply; None where it says nothing."""
Tell = Callable[[float, Outcome], None]
"""Writes a prediction with its reward down."""
Show = Callable[[Outcome, Heard | None], None]


def hearing(listener: ListenerClient, shown: Callable[[Outcome], Awaitable[Sequence[Shown]]]) -> Hear:
    async def hear(outcome: Outcome) -> Heard | None:
        question = described(outcome.replies[-1], category=str(outcome.payload["category"])).question
        return await listener.hear(await shown(outcome), question) if question else None

    return hear


def speaker_rubric(
    hear: Hear, *, parts: Sequence[str], mode: str, variant: str, tell: Tell, witnesses: Mapping[str, Hear] = MappingProxyType({}),
    show: Show = lambda outcome, heard: None,
) -> Rubric:  # fmt: skip
    """An episode is solved where the listener picks the target (part `picked`, which counts nothing, as `words` does: how many are said).

    `witnesses` are listeners that hear held-out games and never reward: a part each, of weight 0. `show` is told what was heard.
    """

    async def picked(outcome: Outcome) -> float:
        heard, target = await hear(outcome), outcome.payload["target"]
        tell(accuracy_of(heard, target=target, mode=mode), outcome)
        show(outcome, heard)
        return _is_pick(heard, target)

    def witness(hears: Hear) -> Reward:
        async def reward(outcome: Outcome) -> float | None:
            return _is_pick(await hears(outcome), outcome.payload["target"]) if is_held_out(outcome.rollout.example_id) else None

        return reward

    async def accuracy(outcome: Outcome) -> float:
        return accuracy_of(await hear(outcome), target=outcome.payload["target"], mode=mode)

    functions: dict[str, Reward] = {
        "accuracy": accuracy,
        "format": _of_text(lambda text, category: format_of(text, variant=variant)),
        "length": _of_text(lambda text, category: length_of(text, category=category, variant=variant)),
        "overlap": _of_text(lambda text, category: overlap_of(text, category=category)),
    }
    told = {"picked": picked, "words": _of_text(num_words), **{name: witness(hears) for name, hears in witnesses.items()}}
    counted = {name: Part(functions[name]) for name in parts}
    return Rubric(parts={**{name: Part(reward, weight=0.0) for name, reward in told.items()}, **counted}, solved_by="picked")


def is_held_out(example_id: str) -> bool:
    """As tasks/lewis/games.py names examples."""
    return example_id.startswith("eval/")


def _is_pick(heard: Heard | None, target: object) -> float:
    return float(heard is not None and heard.predicted_index == target)


def num_words(text: str, category: str) -> float:
    """Of what a listener is told."""
    said = described(text, category=category)
    return float(len(said.coarse.split()) + len(said.detailed.split()))


def accuracy_of(heard: Heard | None, *, target: int, mode: str) -> float:
    """0 for a reply that says nothing a listener could be asked about."""
    if heard is None:
        return 0.0
    is_right = heard.predicted_index == target
    if mode == "binary":
        return float(is_right)
    return heard.reward_score if is_right or mode == "soft_always" else 0.0


def format_of(text: str, *, variant: str) -> float:
    pairs = tag_pairs(text)
    return float(all(pairs)) if variant == "readme" else sum(worth for worth, there in zip(TAG_PAIRS, pairs, strict=True) if there)


def length_of(text: str, *, category: str, variant: str) -> float:
    said = described(text, category=category)
    num_sentences = len(sentences(said.detailed))
    if variant == "readme":
        return 0.1 * (num_sentences == 1)
    is_long, is_short = num_sentences > 1, len(said.detailed.split()) < 20
    return -0.2 * (is_long or is_short) - 0.1 * (not 6 <= len(said.coarse.split()) <= 8)


def overlap_of(text: str, *, category: str) -> float:
    said = described(text, category=category)
    return -max((rouge_2(sentence, f"{said.state} {said.location}") for sentence in sentences(said.detailed)), default=0.0)


def _of_text(function: Callable[[str, str], float]) -> Reward:
    async def reward(outcome: Outcome) -> float:
        return function(outcome.replies[-1], str(outcome.payload["category"]))

    return reward


class Compared(BaseModel):
    """What a listener says that compares pictures."""

    model_config = ConfigDict(extra="forbid", strict=True)
    Reasoning: str
    Answer: str


def compared(text: str) -> Compared | None:
    """Of a reply that is one fenced JSON object; None where it is not."""
    fenced = _FENCED.fullmatch(text)
    try:
        return Compared.model_validate_json(fenced[1]) if fenced else None
    except ValidationError:
        return None


def compared_of(text: str, *, answer: str, reward: str, variant: str) -> float:
    """`answer` is yes, no, or a letter; what is malformed, or none of the answers, earns 0."""
    said = compared(text)
    given = said.Answer.strip().casefold() if said else ""
    if given == answer.casefold():
        return 1.0
    if reward != "weighted" or given not in ("yes", "no"):
        return 0.0
    return FALSE_YES[variant] if given == "yes" else FALSE_NO


def listener_rubric(*, reward: str, variant: str, tell: Tell) -> Rubric:
    async def heard(outcome: Outcome) -> float:
        value = float(outcome.replies[-1].strip().casefold() == outcome.payload["answer"])
        tell(value, outcome)
        return value

    if reward == "heard":
        return Rubric(parts={"heard": Part(heard)}, solved_by="heard")

    async def right(outcome: Outcome) -> float:
        value = compared_of(outcome.replies[-1], answer=str(outcome.payload["answer"]), reward=reward, variant=variant)
        tell(value, outcome)
        return value

    async def form(outcome: Outcome) -> float:
        return float(compared(outcome.replies[-1]) is not None)

    return Rubric(parts={reward: Part(right), "format": Part(form)}, solved_by=reward)
