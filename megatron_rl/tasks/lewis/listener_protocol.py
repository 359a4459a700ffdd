"""HTTP messages of the listener, and the computation of the pick and the reward from p(yes).

    POST /score         {"candidate_paths": [path, ...], "question": text, "topk": 1}
    POST /batch_score   {"batch": [the same, ...]}
    -> {"results": [{"yes_probabilities": [p, ...], "predicted_index": i, "reward_score": r,
                     "top_indices": [i]}], "took": s, "version": v}

The response to /score contains `took`, `version` and, instead of the list `results`, the fields of
a single result. Each result also contains `yes_logprobs`.

A request may contain `candidates` instead of `candidate_paths`. Each candidate is a path below one
of the listener's roots, a base64-encoded image file, or the SHA-256 of a file that was sent before.

The numbers are computed as in the original service of the Lewis game (Deepayan137/Lewis_Game
621d687), whose responses lack yes_logprobs, top_indices and version.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_QUESTION_CHARS = 16384
"""Maximum number of characters of a question."""
MAX_CANDIDATES, MAX_ITEMS = 64, 256
MIN_YES_PROBABILITY = 0.3
"""Minimum p(yes) of the pick for the full reward. With a lower p(yes), the reward is halved,
because the listener does not recognize any candidate.
"""


class StrictMessage(BaseModel):
    """Base class of HTTP messages. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CandidateImage(StrictMessage):
    """Candidate image, identified by exactly one of three fields: path, base64 or sha256."""

    path: Annotated[str, StringConstraints(max_length=4096)] = ""
    base64: str = ""
    sha256: Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")] = ""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if sum(map(bool, (self.path, self.base64, self.sha256))) != 1:
            raise ValueError("a candidate must have exactly one of path, base64 and sha256")
        return self


_Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class ScoreItem(StrictMessage):
    """Question about several candidates, one of which is the target."""

    candidate_paths: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(max_length=MAX_CANDIDATES)
    ] = []
    candidates: Annotated[list[CandidateImage], Field(max_length=MAX_CANDIDATES)] = []
    question: Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUESTION_CHARS)]
    topk: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        if bool(self.candidate_paths) == bool(self.candidates):
            raise ValueError("an item must have either candidate_paths or candidates, not both")
        num = len(self.images)
        if num < 2:
            raise ValueError("an item must have at least two candidates")
        if self.topk > num:
            raise ValueError(f"topk={self.topk}: must be at most {num}, the number of candidates")
        return self

    @property
    def images(self) -> list[CandidateImage]:
        """Candidate images, in the order of the request."""
        return self.candidates or [CandidateImage(path=path) for path in self.candidate_paths]


class ScoreBatch(StrictMessage):
    """Body of /batch_score."""

    batch: Annotated[list[ScoreItem], Field(min_length=1, max_length=MAX_ITEMS)]


class ListenerScore(StrictMessage):
    """Listener's score for one item, with one probability per candidate."""

    yes_probabilities: list[Annotated[float, Field(ge=0, le=1)]]
    yes_logprobs: list[Annotated[float, Field(le=0)]]
    """Logarithms of yes_probabilities. The logarithms are finite even if a probability underflows
    to 0.
    """
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
    """Seconds from the arrival of the request to the response."""
    version: str
    """Version of the listener. The result of a question does not change while the version is the
    same.
    """


def make_listener_score(yes_logprobs: Sequence[float], *, topk: int = 1) -> ListenerScore:
    """Return the score of an item, given log p(yes) of each candidate.

    The pick is the first candidate with the highest p(yes). The reward is p(yes) of the pick
    divided by the sum of p(yes) over all candidates. If p(yes) of the pick is less than
    MIN_YES_PROBABILITY, the reward is halved. Examples: p(yes) values of 0.6 and 0.2 result in pick
    0 and reward 0.75; values of 0.2 and 0.2 result in pick 0 and reward 0.25.
    """
    order = sorted(range(len(yes_logprobs)), key=lambda index: -yes_logprobs[index])
    most = yes_logprobs[order[0]]
    share = 1 / sum(math.exp(each - most) for each in yes_logprobs)  # scaled by the largest, as all p(yes) may underflow to 0
    return ListenerScore(
        yes_probabilities=[math.exp(each) for each in yes_logprobs],
        yes_logprobs=list(yes_logprobs),
        predicted_index=order[0],
        reward_score=share if math.exp(most) >= MIN_YES_PROBABILITY else share / 2,
        top_indices=order[:topk],
    )
