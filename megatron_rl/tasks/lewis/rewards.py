"""Rewards of the Lewis game.

The README and the code of the original game (Deepayan137/Lewis_Game 621d687) define different
rewards. The setting `variant` selects the rewards from the README (`readme`) or from the code
(`code`).

The reward of the speaker is the sum of the configured terms:

- accuracy: depends on the accuracy mode. In mode `binary`, the term is 1 if the listener picks the
  target, else 0. In mode `soft_gated`, the term is the listener's reward_score if the listener
  picks the target, else 0. In mode `soft_always`, the term is always the listener's reward_score.
  Variant `readme` supports only `binary`. The default mode of variant `code` is `soft_gated`.
- format: in variant `readme`, the term is 1 if the reply contains all three tag pairs, else 0. In
  variant `code`, each tag pair in the reply adds to the term: 0.34 for `thinking`, 0.33 for
  `coarse` and 0.33 for `detailed`.
- length: in variant `readme`, the term is 0.1 if the detailed part is one sentence, else 0. In
  variant `code`, the term is the sum of two penalties: -0.2 if the detailed part has more than one
  sentence or fewer than 20 words, and -0.1 if the coarse part has fewer than 6 or more than 8
  words.
- overlap: exists only in variant `code`. The term is the negative of the largest ROUGE-2 score
  between a sentence of the detailed part and the text of the state and location parts. With this
  term, the prompt also asks for the object's state and location.

With `word_cost`, each word of the coarse and detailed parts reduces the reward by this cost.

The reward of the listener is one of the following terms:

- consistency: 1 if the yes-or-no answer is right.
- weighted: 1 if the yes-or-no answer is right, -0.3 for a wrong no, and -1 for a wrong yes (-0.7 in
  variant `readme`).
- selection: 1 if the answer is the letter of the right candidate.
- heard: 1 if the reply is exactly the right answer, yes or no, without other text.

Unless this term is `heard`, the following term is added to the reward:

- format: 1 if the reply is one fenced JSON object with the keys Reasoning and Answer.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_rl.rewards.rubric import RewardFn, RewardInput, RewardTerm, Rubric
from megatron_rl.tasks.lewis.description import check_tag_pairs, parse_description, rouge_2_f1, split_sentences
from megatron_rl.tasks.lewis.listener_client import ImageFile, ListenerClient
from megatron_rl.tasks.lewis.listener_protocol import ListenerScore

TAG_PAIR_REWARDS = (0.34, 0.33, 0.33)
FALSE_YES_REWARD, FALSE_NO_REWARD = {"readme": -0.7, "code": -1.0}, -0.3
_FENCED = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)

ListenerFn = Callable[[RewardInput], Awaitable[ListenerScore | None]]
"""Function that returns the listener's score for a reply, or None if the reply has no description.
"""
LogPredictionFn = Callable[[float, RewardInput], None]
"""Function that logs a prediction with its reward."""
RecordScoreFn = Callable[[RewardInput, ListenerScore | None], None]


def make_listener_fn(listener: ListenerClient, read_candidates: Callable[[RewardInput], Awaitable[Sequence[ImageFile]]]) -> ListenerFn:
    """Return a function that requests the listener's score for the description in a reply.

    Args:
        listener: Client of the listener.
        read_candidates: Function that returns the candidate images of a round.
    """

    async def hear(outcome: RewardInput) -> ListenerScore | None:
        question = parse_description(outcome.replies[-1], category=str(outcome.payload["category"])).question
        return await listener.score_images(await read_candidates(outcome), question) if question else None

    return hear


def speaker_rubric(
    listener_fn: ListenerFn, *, term_names: Sequence[str], accuracy_mode: str, variant: str, log_prediction: LogPredictionFn,
    word_cost: float = 0.0, held_out_listeners: Mapping[str, ListenerFn] = MappingProxyType({}),
    record_score: RecordScoreFn = lambda outcome, heard: None,
) -> Rubric:  # fmt: skip
    """Return the rubric of the speaker.

    The term `picked` is 1 if the listener picks the target; the episode then counts as solved. It
    has weight 0. The term `words` is the number of words in the description, with weight
    -`word_cost`.

    Args:
        listener_fn: Function that returns the listener's score for a reply.
        term_names: Names of the terms that are added up to form the reward.
        accuracy_mode: Mode of the term `accuracy`: binary, soft_gated or soft_always.
        variant: Variant of the rewards: readme or code.
        log_prediction: Function that logs each reply with its accuracy reward.
        word_cost: Cost of each word.
        held_out_listeners: Functions that return the scores of held-out listeners, keyed by
            listener name. Each function adds a term of weight 0, which is computed only on held-out
            games.
        record_score: Function that is called with the listener's score for each reply.
    """

    async def picked(outcome: RewardInput) -> float:
        heard, target = await listener_fn(outcome), outcome.payload["target"]
        log_prediction(accuracy_reward(heard, target=target, accuracy_mode=accuracy_mode), outcome)
        record_score(outcome, heard)
        return _picks_target(heard, target)

    def witness(hears: ListenerFn) -> RewardFn:
        async def reward(outcome: RewardInput) -> float | None:
            return _picks_target(await hears(outcome), outcome.payload["target"]) if is_held_out(outcome.rollout.example_id) else None

        return reward

    async def accuracy(outcome: RewardInput) -> float:
        return accuracy_reward(await listener_fn(outcome), target=outcome.payload["target"], accuracy_mode=accuracy_mode)

    functions: dict[str, RewardFn] = {
        "accuracy": accuracy,
        "format": _make_text_reward(lambda text, category: format_reward(text, variant=variant)),
        "length": _make_text_reward(lambda text, category: length_reward(text, category=category, variant=variant)),
        "overlap": _make_text_reward(lambda text, category: overlap_reward(text, category=category)),
    }
    terms = {
        "picked": RewardTerm(picked, weight=0.0),
        "words": RewardTerm(_make_text_reward(count_words), weight=-word_cost),
        **{name: RewardTerm(witness(hears), weight=0.0) for name, hears in held_out_listeners.items()},
        **{name: RewardTerm(functions[name]) for name in term_names},
    }
    return Rubric(terms=terms, solved_term="picked")


def is_held_out(example_id: str) -> bool:
    """Return True if the example belongs to the eval split, i.e. if the id begins with eval/."""
    return example_id.startswith("eval/")


def _picks_target(listener_score: ListenerScore | None, target: object) -> float:
    return float(listener_score is not None and listener_score.predicted_index == target)


def count_words(text: str, category: str) -> float:
    """Return the total number of words in the coarse and detailed parts of the description."""
    said = parse_description(text, category=category)
    return float(len(said.coarse.split()) + len(said.detailed.split()))


def accuracy_reward(listener_score: ListenerScore | None, *, target: int, accuracy_mode: str) -> float:
    """Return the accuracy reward for a listener's score.

    If the reply has no description, `listener_score` is None and the reward is 0.
    """
    if listener_score is None:
        return 0.0
    is_right = listener_score.predicted_index == target
    if accuracy_mode == "binary":
        return float(is_right)
    return listener_score.reward_score if is_right or accuracy_mode == "soft_always" else 0.0


def format_reward(text: str, *, variant: str) -> float:
    """Return the reward for the tag pairs in a reply."""
    pairs = check_tag_pairs(text)
    return float(all(pairs)) if variant == "readme" else sum(worth for worth, there in zip(TAG_PAIR_REWARDS, pairs, strict=True) if there)


def length_reward(text: str, *, category: str, variant: str) -> float:
    """Return the reward for the length of the description."""
    said = parse_description(text, category=category)
    num_sentences = len(split_sentences(said.detailed))
    if variant == "readme":
        return 0.1 * (num_sentences == 1)
    is_long, is_short = num_sentences > 1, len(said.detailed.split()) < 20
    return -0.2 * (is_long or is_short) - 0.1 * (not 6 <= len(said.coarse.split()) <= 8)


def overlap_reward(text: str, *, category: str) -> float:
    """Return the penalty (at most 0) for a detailed part that repeats the state or location."""
    said = parse_description(text, category=category)
    return -max((rouge_2_f1(sentence, f"{said.state} {said.location}") for sentence in split_sentences(said.detailed)), default=0.0)


def _make_text_reward(function: Callable[[str, str], float]) -> RewardFn:
    async def reward(outcome: RewardInput) -> float:
        return function(outcome.replies[-1], str(outcome.payload["category"]))

    return reward


class ComparisonReply(BaseModel):
    """JSON object in the reply of a listener that compares images."""

    model_config = ConfigDict(extra="forbid", strict=True)
    Reasoning: str
    Answer: str


def parse_comparison(text: str) -> ComparisonReply | None:
    """Parse a reply that is one fenced JSON object. Return None for other replies."""
    fenced = _FENCED.fullmatch(text)
    try:
        return ComparisonReply.model_validate_json(fenced[1]) if fenced else None
    except ValidationError:
        return None


def comparison_reward(text: str, *, answer: str, reward: str, variant: str) -> float:
    """Return the reward for the reply of a listener that compares images.

    Args:
        text: Reply of the listener.
        answer: Right answer: yes, no, or the letter of a candidate.
        reward: Name of the reward. Only the reward `weighted` has penalties for a wrong yes or no.
        variant: Variant of the rewards: readme or code.

    Returns:
        1 for the right answer, the penalty if one applies, and 0 otherwise, including for a
        malformed reply.
    """
    said = parse_comparison(text)
    given = said.Answer.strip().casefold() if said else ""
    if given == answer.casefold():
        return 1.0
    if reward != "weighted" or given not in ("yes", "no"):
        return 0.0
    return FALSE_YES_REWARD[variant] if given == "yes" else FALSE_NO_REWARD


def listener_rubric(*, reward_name: str, variant: str, log_prediction: LogPredictionFn) -> Rubric:
    """Return the rubric of the listener."""

    async def heard(outcome: RewardInput) -> float:
        value = float(outcome.replies[-1].strip().casefold() == outcome.payload["answer"])
        log_prediction(value, outcome)
        return value

    if reward_name == "heard":
        return Rubric(terms={"heard": RewardTerm(heard)}, solved_term="heard")

    async def right(outcome: RewardInput) -> float:
        value = comparison_reward(outcome.replies[-1], answer=str(outcome.payload["answer"]), reward=reward_name, variant=variant)
        log_prediction(value, outcome)
        return value

    async def form(outcome: RewardInput) -> float:
        return float(parse_comparison(outcome.replies[-1]) is not None)

    return Rubric(terms={reward_name: RewardTerm(right), "format": RewardTerm(form)}, solved_term=reward_name)
