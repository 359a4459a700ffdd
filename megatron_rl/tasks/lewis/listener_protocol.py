"""HTTP messages of the listener, and the rule that turns p(yes) into a pick and a reward.

    POST /score         {"candidate_paths": [path, ...], "question": text, "topk": 1}
    POST /batch_score   {"batch": [the same, ...]}
    -> {"results": [{"yes_probabilities": [p, ...], "predicted_index": i, "reward_score": r,
                     "top_indices": [i]}], "took": s, "version": v}

/score returns the fields of its one result next to `took` and `version`. Results also have
`yes_logprobs`. Candidates are paths below the listener's roots, or `candidates`: each a path, the
base64 of an image file, or the SHA-256 of a file that was sent before. The numbers are those of the
Lewis game's service (Deepayan137/Lewis_Game 621d687), which has no logarithms, top_indices or
version.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_QUESTION_CHARS = 16384
"""Maximum number of characters of a question."""
MAX_CANDIDATES, MAX_ITEMS = 64, 256
MIN_YES_PROBABILITY = 0.3
"""If no candidate has this p(yes), the reward is halved, because the listener recognizes none of
them.
"""


class StrictMessage(BaseModel):
    """Base class of messages; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CandidateImage(StrictMessage):
    """One image, by exactly one of path, base64 and hash."""

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
    """Question about candidates, one of which is the target."""

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
        """Candidates, in the order of the request."""
        return self.candidates or [CandidateImage(path=path) for path in self.candidate_paths]


class ScoreBatch(StrictMessage):
    """Body of /batch_score."""

    batch: Annotated[list[ScoreItem], Field(min_length=1, max_length=MAX_ITEMS)]


class ListenerScore(StrictMessage):
    """Listener's score of an item."""

    yes_probabilities: list[Annotated[float, Field(ge=0, le=1)]]
    yes_logprobs: list[Annotated[float, Field(le=0)]]
    """Logarithms of yes_probabilities, which also represent probabilities that underflow."""
    predicted_index: Annotated[int, Field(ge=0)]
    reward_score: Annotated[float, Field(ge=0, le=1)]
    top_indices: list[Annotated[int, Field(ge=0)]]


class ScoreResponse(ListenerScore):
    """Response to /score."""

    took: float
    version: str


class BatchScoreResponse(StrictMessage):
    """Response to /batch_score."""

    results: list[ListenerScore]
    took: float
    """Seconds since the request arrived."""
    version: str
    """Version of the listener; the same question has the same result under the same version."""


def make_listener_score(yes_logprobs: Sequence[float], *, topk: int = 1) -> ListenerScore:
    """Return the score for log p(yes) of each candidate.

    The pick is the most likely candidate (the first of equals). The reward is its share of the sum
    of all p(yes), halved if no candidate has MIN_YES_PROBABILITY. Example: p(yes) of 0.6 and 0.2
    gives pick 0 and reward 0.75; 0.2 and 0.2 gives pick 0 and reward 0.25.
    """
    order = sorted(range(len(yes_logprobs)), key=lambda index: -yes_logprobs[index])
    most = yes_logprobs[order[0]]
    share = 1 / sum(math.exp(each - most) for each in yes_logprobs)  # relative to the largest: all p(yes) may underflow to 0
    return ListenerScore(
        yes_probabilities=[math.exp(each) for each in yes_logprobs],
        yes_logprobs=list(yes_logprobs),
        predicted_index=order[0],
        reward_score=share if math.exp(most) >= MIN_YES_PROBABILITY else share / 2,
        top_indices=order[:topk],
    )
