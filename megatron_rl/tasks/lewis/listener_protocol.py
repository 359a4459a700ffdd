"""What a listener is asked and what it answers, for both ends of the wire; and how its yes or no becomes a pick and a reward.

    POST /score         {"candidate_paths": [path, ...], "question": text, "topk": 1}
    POST /batch_score   {"batch": [the same, ...]}
    -> {"results": [{"yes_probabilities": [p, ...], "predicted_index": i, "reward_score": r, "top_indices": [i]}], "took": s, "version": v}

/score answers with that one result, beside `took` and `version`; results have `yes_logprobs`, too. Candidates are paths below the
listener's roots, or `candidates`: each a path, the base64 of an image file, or the SHA-256 of a file that was sent before. The numbers are
those of the Lewis game's service (Deepayan137/Lewis_Game 621d687), which has neither logarithms, top_indices nor version.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_QUESTION_CHARS = 16384
"""Characters."""
MAX_CANDIDATES, MAX_ITEMS = 64, 256
MIN_YES_PROBABILITY = 0.3
"""Where no candidate has as much, the reward is halved: the listener recognizes none of them."""


class StrictMessage(BaseModel):
    """A misspelled key is an error of the caller's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CandidateImage(StrictMessage):
    """One picture."""

    path: Annotated[str, StringConstraints(max_length=4096)] = ""
    base64: str = ""
    sha256: Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")] = ""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if sum(map(bool, (self.path, self.base64, self.sha256))) != 1:
            raise ValueError("a candidate has one of path, base64 and sha256")
        return self


_Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class ScoreItem(StrictMessage):
    """A question about candidates, one of which is meant."""

    candidate_paths: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(max_length=MAX_CANDIDATES)
    ] = []
    candidates: Annotated[list[CandidateImage], Field(max_length=MAX_CANDIDATES)] = []
    question: Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUESTION_CHARS)]
    topk: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        if bool(self.candidate_paths) == bool(self.candidates):
            raise ValueError("an item has candidate_paths or candidates, and not both")
        num = len(self.images)
        if num < 2:
            raise ValueError("one candidate is no choice: give at least two")
        if self.topk > num:
            raise ValueError(f"topk={self.topk} of {num} candidates")
        return self

    @property
    def images(self) -> list[CandidateImage]:
        return self.candidates or [CandidateImage(path=path) for path in self.candidate_paths]


class ScoreBatch(StrictMessage):
    batch: Annotated[list[ScoreItem], Field(min_length=1, max_length=MAX_ITEMS)]


class ListenerScore(StrictMessage):
    """What a listener makes of an item."""

    yes_probabilities: list[Annotated[float, Field(ge=0, le=1)]]
    yes_logprobs: list[Annotated[float, Field(le=0)]]
    """Their logarithms, which tell what is too small for a probability."""
    predicted_index: Annotated[int, Field(ge=0)]
    reward_score: Annotated[float, Field(ge=0, le=1)]
    top_indices: list[Annotated[int, Field(ge=0)]]


class ScoreResponse(ListenerScore):
    """Of one item."""

    took: float
    version: str


class BatchScoreResponse(StrictMessage):
    results: list[ListenerScore]
    took: float
    """Seconds, from the request's arrival."""
    version: str
    """Of the listener: what it answers is the same as long as this is."""


def make_listener_score(yes_logprobs: Sequence[float], *, topk: int = 1) -> ListenerScore:
    """Of the logarithms of p(yes) by candidate. The pick is the likeliest (the first of equals); the reward is its share of all p(yes),
    halved where no candidate has MIN_YES_PROBABILITY. Example: p(yes) of 0.6 and 0.2 gives pick 0 and reward 0.75; 0.2 and 0.2 gives 0 and
    0.25."""
    order = sorted(range(len(yes_logprobs)), key=lambda index: -yes_logprobs[index])
    most = yes_logprobs[order[0]]
    share = 1 / sum(math.exp(each - most) for each in yes_logprobs)  # in logarithms: all p(yes) may be 0 in floating point
    return ListenerScore(
        yes_probabilities=[math.exp(each) for each in yes_logprobs],
        yes_logprobs=list(yes_logprobs),
        predicted_index=order[0],
        reward_score=share if math.exp(most) >= MIN_YES_PROBABILITY else share / 2,
        top_indices=order[:topk],
    )
