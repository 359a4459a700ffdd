"""Shared records: `Rollout` for one episode, `MicroBatch` and `LossInputs` for the trainer.

Shape suffixes of tensor names:

    T  tokens of one packed micro-batch    S  its segments (S1 = S + 1)    L  tokens of one sequence
    P  vision patches    C  values of one patch (channels x frames x rows x columns)    I  images
    M  vision tokens after merging (one token per square of patches)
    R  rows that need logits: the positions with a sampled target
    H  hidden size    G  rollouts of a group    V  vocabulary size

The file has over 300 lines because these records share one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # environments and rewards create these records without importing torch
    import torch
    from PIL.Image import Image as Picture


Message = Mapping[str, object]
"""One chat message as Hugging Face chat templates expect it: {"role": ..., "content": text or
parts}. A part is {"type": "text", "text": ...} or {"type": "image", "image": a PIL image}.
"""


class Status(StrEnum):
    """Outcome of an episode as far as rewards and training are concerned."""

    COMPLETED = "completed"
    """The environment or the policy ended the episode, which is scored and trained on."""
    TRUNCATED = "truncated"
    """A budget of the policy (turns, tokens, images, pixels or seconds) ran out; the episode is
    scored and trained on.
    """
    FAILED = "failed"
    """An infrastructure error in the engine, a tool or a judge. The episode is counted, but never
    scored or trained on.
    """


class StopReason(StrEnum):
    """Reason for the end of an episode. `MAX_*` members are budgets of the policy that ran out."""

    DONE = "done"
    """The policy answered, or the environment reached its end."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The sequence had no space left for another response or for the observation."""
    MAX_IMAGES = "max_images"
    MAX_PIXELS = "max_pixels"
    MAX_SECONDS = "max_seconds"
    TOOL_ERROR = "tool_error"
    """A tool call failed, and task.stop_on_tool_error ends episodes on that."""
    INFRA_ERROR = "infra_error"
    """Infrastructure error (InfraError); the rollout is failed."""
    PERMANENT_INFRA_ERROR = "permanent_infra_error"
    """Infrastructure error that every retry would meet again (PermanentInfraError)."""
    INFRA_TIMEOUT = "infra_timeout"
    """Infrastructure error after the longest allowed wait for the failed part (InfraTimeout)."""
    ACCESS_DENIED = "access_denied"
    """A server rejected the key or token of the run (AccessDenied); the run ends."""


@dataclass(slots=True, frozen=True)
class Example:
    """One example of a data set: the start of an episode. Only the task interprets its payload."""

    id: str
    payload: Mapping[str, object]
    probability: float | None = None
    """Probability of drawing this example, if known. Evaluation weights results by it."""
    where: str = ""
    """File and row that the example was read from, for messages: `train.jsonl row 17`."""
    source: str = ""
    """Data source of the example in a mixture; metrics are also reported per source."""

    def __str__(self) -> str:
        """Return a name for messages. Example: `example train/17 (train.jsonl row 17)`."""
        return f"example {self.id}" + (f" ({self.where})" if self.where else "")


@dataclass(slots=True, frozen=True)
class Demonstration:
    """A transcript for supervised fine-tuning, with the loss on the assistant's messages only.

    An assistant message with "loss": False is part of the sequence, but its tokens have no loss.
    """

    messages: list[Message]
    where: str = ""
    """File and row that the transcript was read from, for messages: `t.jsonl row 17`."""


@dataclass(slots=True, frozen=True)
class Image:
    """An image at its final size, with the patches that engine and trainer both use.

    Equal pixels have equal keys.
    """

    pil: Picture | None
    """The pixels. None if another rank holds them (distributed/image_exchange.py) or if the record
    was read without them (io/rollout_codec.from_record).
    """
    patch_PC: torch.Tensor | None
    """float32 [P, C], the output of the only processor call, which the engine receives as it is.
    The patches take eight times the memory of the pixels. None after the episode; Renderer.patches
    recomputes them.
    """
    grid: tuple[int, int, int]
    """Frames, rows and columns in patches; rows and columns are multiples of `merge`."""
    key: str
    merge: int
    """Number of patches along each side of the square that becomes one vision token."""

    @property
    def num_tokens(self) -> int:
        """Number of vision tokens, and of placeholder ids in the sequence."""
        frames, rows, columns = self.grid
        return frames * rows * columns // self.merge**2

    @property
    def num_patches(self) -> int:
        """Number of patches before merging."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def without_patches(self) -> Image:
        """Return a copy without `patch_PC`."""
        return replace(self, patch_PC=None)


@dataclass(slots=True)
class TokenSequence:
    """Token ids as the engine processed and sampled them, with all columns aligned to them.

    Example: prompt ids [5, 6] and sampled ids [7, 8], sampled with weight version 4, give

        token_ids         [5,   6,   7,    8]
        loss_mask         [0,   0,   1,    1]
        rollout_logprobs  [0.0, 0.0, -0.3, -1.2]
        weight_versions   [-1,  -1,  4,    4]
        advantages        [0.0, 0.0, 0.5,  0.5]      written later by the advantage function
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the policy that sampled it; 0.0 where the mask is 0."""
    weight_versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token; -1 where the mask is 0."""
    images: list[Image] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the trainer's weights at the start of the step. Empty
    until computed.
    """
    reference_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the reference model. Empty until computed."""
    values: list[float] = field(default_factory=list)
    """Critic's value of the state before each sampled token. Empty until computed."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each sampled token; 0.0 where the mask is 0. Empty until computed."""
    returns: list[float] = field(default_factory=list)
    """Critic's target for the state before each sampled token. Empty until computed."""
    logprob_scale: list[float] = field(default_factory=list)
    """Factor on each sampled token's logprob in the policy loss (algo.thought_logprob_scale). Empty
    means 1 everywhere.
    """
    entropies: list[float] = field(default_factory=list)
    """Entropy, in nats, of the trainer's distribution for each sampled token when it was first
    trained on (batching/token_stats.py). Empty if not recorded.
    """

    def extend(
        self, token_ids: list[int], *,
        logprobs: list[float] | None = None, versions: list[int] | None = None, images: tuple[Image, ...] = (),
    ) -> None:  # fmt: skip
        """Append tokens. Pass `logprobs` for sampled tokens; omit it for observed ones.

        All tokens of a sequence enter by this method. Image placeholders in `token_ids` are already
        expanded: one id per vision token.

        Args:
            token_ids: Ids to append.
            logprobs: Logprob of each token under the policy that sampled it. The tokens get loss
                mask 1.
            versions: Weight version of each sampled token. None means 0, the weights before any
                update. Not allowed for observed tokens.
            images: Images of the placeholders, in order. Not allowed for sampled tokens.
        """
        sampled = logprobs is not None
        assert not (sampled and images), "the policy does not sample images"
        assert sampled or versions is None, "what was observed has no version"
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([int(sampled)] * len(token_ids))
        self.rollout_logprobs.extend(logprobs if sampled else [0.0] * len(token_ids))
        self.weight_versions.extend([0 if sampled else -1] * len(token_ids) if versions is None else versions)
        self.images.extend(images)
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs), len(self.weight_versions))
        assert len(set(lengths)) == 1, f"token_ids, loss_mask, rollout_logprobs, weight_versions have lengths {lengths}"

    def set_column(self, column: str, numbers: list[float]) -> None:
        """Set a column of TOKEN_COLUMNS, with one number for every token of the sequence."""
        assert column in TOKEN_COLUMNS, f"{column} is none of {TOKEN_COLUMNS}"
        assert len(numbers) == len(self.token_ids), f"{len(numbers)} {column} for {len(self.token_ids)} tokens"
        setattr(self, column, numbers)


TOKEN_COLUMNS = ("old_logprobs", "reference_logprobs", "values", "advantages", "returns", "logprob_scale", "entropies")
"""Columns of TokenSequence that models and advantage functions fill after the rollout."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolCall:
    """A tool call in a response and its result as text. Returned images are in Turn.images."""

    tool: str
    """Name of the tool: `python`, `zoom`, `move`, ..."""
    source: str
    """The code to run, or the arguments as JSON."""
    text: str = ""
    """Result text that was returned to the policy."""
    error: str = ""
    """Error message of a failure that the policy caused; empty if the call succeeded."""
    ran: bool = True
    """True if the call was executed: the response could be parsed and the tool exists."""
    frame: tuple[int, int] | None = None
    """Width and height of the image that a box in `source` refers to; the policy may have received
    a smaller version of it. None for tools without a box argument.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class JudgeResult:
    """Verdict of a judge model about an episode or a turn.

    Judge prompts allow only a number as the answer.
    """

    judge: str
    """Name of the judge model."""
    prompt: str
    """Name and version of the judge prompt."""
    value: float
    turn: int | None = None
    """Index into Rollout.turns of the judged turn; None for a verdict about the whole episode."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds from the request to the answer, including waiting times and failed attempts."""
    reasoning: str = field(default="", compare=False)
    """Beginning of the judge's reasoning, if its server returns it separately from the answer.
    Empty if the verdict comes from an older entry of task.judge.cache.
    """


@dataclass(slots=True)
class Turn:
    """One response of the policy and its consequences."""

    sequence: int
    """Index into Rollout.sequences of the sequence that holds the response."""
    token_span: tuple[int, int]
    """Positions of the first and one past the last sampled token in that sequence."""
    text: str
    """The response as text."""
    action_start: int | None = None
    """Position in the sequence of the first token of the action, after the thoughts. None if the
    environment does not set rollout.task.Step.action_char.
    """
    reward: float = 0.0
    """Reward that the environment returned for this turn."""
    step_score: float | None = None
    """Weighted sum of the rubric's turn terms for this turn; None if no turn term scores it."""
    reward_delta: float = 0.0
    """Change of the episode's reward by this turn. The reward is Rollout.outcome_reward plus the
    sum of these over the turns.
    """
    tool_call: ToolCall | None = None
    images: list[Image] = field(default_factory=list)
    """Images of the observation that followed, as the policy received them."""
    state: str = ""
    """Name of the state before the response (Env.state); empty if the environment has none."""
    generation_s: float = field(default=0.0, compare=False)
    """Seconds until the response was complete."""
    env_s: float = field(default=0.0, compare=False)
    """Seconds of the environment's step after the response, including the tool call and the wait
    for a free tool.
    """


@dataclass(slots=True)
class Rollout:
    """One episode with its tokens, turns and reward.

    It is on CPU, printable, and complete enough to be trained on again.

    Example: the policy zooms into the image of a question (turn 0), then answers (turn 1). Id 2 is
    the image placeholder; the question's image has two vision tokens, the zoomed crop has one. The
    rubric has the term "accuracy" (weight 1) and the turn term "evidence" (weight 0.5, mean over
    the scored turns), which scores turn 0 only.

        sequences[0].token_ids       [1, 2, 2, 3, 7, 8, 4, 2, 5, 9]
        sequences[0].loss_mask       [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
        turns[0].token_span          (4, 6)       turns[1].token_span     (9, 10)
        turns[0].step_score          0.5          turns[1].step_score     None
        turns[0].reward_delta        0.5          turns[1].reward_delta   0.0
        reward_terms                 {"accuracy": 1.0, "evidence": 1.0}
        reward                       1.5 = outcome_reward 1.0 + reward_delta 0.5 + 0.0
        num_sampled                  3
    """

    task: str
    example_id: str
    group: int
    """Group number. Rollouts of one group start from the same example and share a baseline."""
    sample_index: int
    """Number of the rollout in its group."""
    source: str = ""
    """Data source of the example (Example.source)."""
    question: str = ""
    """Question of the data set, with <image> for each image; empty for games."""
    answer: str = ""
    """Reference answer; empty if the task has none."""
    extra: str = ""
    """Other fields of the example as one JSON object, without images (rollout/example_fields.py);
    empty if there are none.
    """
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.COMPLETED
    stop_reason: StopReason = StopReason.DONE
    reason: str = ""
    """Environment's reason for the end, such as 'goal', or the message of the error."""
    reward: float | None = None
    """Total reward. None until the episode is scored, and always None for a failed episode."""
    outcome_reward: float = 0.0
    """Part of the reward that the turn terms did not contribute."""
    filter_reason: str = ""
    """Reason for not training on a scored rollout (algo/filtering.py); empty if it is used."""
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward term, by name."""
    verdicts: list[JudgeResult] = field(default_factory=list)
    """Judge verdicts used for the reward: those about turns first, in order of the turns."""
    wall_s: float = 0.0
    """Seconds from the prompt to the closed environment, including earlier failed attempts."""
    env_s: float = 0.0
    """Seconds of `wall_s` in environment steps, including tool calls and waits for a free tool."""
    scoring_s: float = 0.0
    """Seconds of `wall_s` spent in the rubric, mostly waiting for judges."""

    @property
    def images(self) -> list[Image]:
        """Images of all sequences and observations, in order. Most images occur several times."""
        return [image for each in (*self.sequences, *self.turns) for image in each.images]

    def drop_patches(self) -> None:
        """Remove the patches of all images and keep their pixels."""
        for each in (*self.sequences, *self.turns):
            each.images = [image.without_patches() for image in each.images]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens over all sequences."""
        return sum(sum(context.loss_mask) for context in self.sequences)

    @property
    def used_tool(self) -> bool:
        """Return True if at least one tool call was executed without an error."""
        return any(turn.tool_call is not None and turn.tool_call.ran and not turn.tool_call.error for turn in self.turns)

    @property
    def is_scored(self) -> bool:
        """Return True unless the episode failed."""
        return self.status is not Status.FAILED

    @property
    def is_trained_on(self) -> bool:
        """Return True if the rollout is scored and not filtered out."""
        return self.is_scored and not self.filter_reason

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that sampled any token; -1 if no token was sampled."""
        return min((version for context in self.sequences for version in context.weight_versions if version >= 0), default=-1)


@dataclass(slots=True, frozen=True)
class SegmentSource:
    """Origin of a packed segment's tokens."""

    rollout: int
    """Index into the list of packed rollouts."""
    sequence: int
    """Index into that rollout's sequences."""
    start: int
    """Position in the sequence at which the segment starts."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch: flat tensors without padding between segments.

    It is independent of tasks, groups and algorithms.

    Entry t predicts token t + 1: `pack` has already shifted target_T, mask_T, weight_T and every
    other *_T quantity of the loss. Example: the sequences [5 6 7 8] (7 and 8 sampled) and [9 4] (4
    sampled) of two rollouts, with batch.loss_agg_mode=token_mean and no shared prefix, give

        token_T            [5   6    7    8   9    4]
        target_T           [6   7    8    0   4    0]
        mask_T             [0   1    1    0   1    0]
        weight_T           [0   1    1    0   1    0]        denominator   3
        rollout_logprob_T  [0  -0.3 -1.2  0  -0.7  0]
        advantage_T        [0   0.5  0.5  0  -1    0]
        sequence_T         [0   0    0    0   1    1]
        position_3T        3 x [0 1 2 3 0 1]
        cu_seqlens_S1      [0 4 6]                           prefix_S      [-1 -1]
    """

    token_T: torch.Tensor
    target_T: torch.Tensor
    mask_T: torch.Tensor
    """bool: the target was sampled by the policy (or, in supervised fine-tuning, has a loss)."""
    weight_T: torch.Tensor
    """float32 weight of entry t in the loss, before the division by the global denominator; 0 where
    mask_T is False.
    """
    position_3T: torch.Tensor
    """Rotary positions: frame, row, column."""
    sequence_T: torch.Tensor
    """Number of the sequence that entry t belongs to, from 0 within the micro-batch. Tokens shared
    by several sequences count as the first one's. The entries of one sequence are neighbors.
    """
    cu_seqlens_S1: torch.Tensor
    """int32 offsets of the segments; the last equals T."""
    offset_S1: list[int]
    """cu_seqlens_S1 as a list on the host. A layer that read them from the device would block until
    all queued kernels are done.
    """
    prefix_S: list[int]
    """For each segment the index of the earlier segment that it continues, or -1. A prefix shared
    by several sequences is stored as one segment that the remaining parts continue, so the segments
    form a tree.
    """
    origin_S: list[SegmentSource | None]
    """Source of each segment's tokens, to map per-token results back to rollouts. A shared segment
    names the first of its sequences. None for padding, and for sequences that belong to no rollout.
    """
    images: list[Image]
    """Distinct images of the batch. Each is encoded once, also if several sequences use it."""
    patch_PC: torch.Tensor | None = None
    """Patches of the images that this rank encodes (policy/patches.py). All patches of a step would
    take more memory than the weights, so they are made on the host just before the micro-batch
    runs. None before and after.
    """
    grid_I3: torch.Tensor
    """Frames, rows and columns in patches of each entry of `images`; on the host, as are values
    derived from it.
    """
    vision_position_M: torch.Tensor
    """Positions in token_T that a vision embedding replaces, in order."""
    vision_row_M: torch.Tensor
    """Row of the vision encoder's output that goes to each position of vision_position_M."""
    denominator: int
    """This micro-batch's share of the global denominator. Shares are summed over micro-batches and
    data-parallel ranks.
    """
    advantage_T: torch.Tensor
    """Advantage of each target; 0 where mask_T is False."""
    rollout_logprob_T: torch.Tensor
    """Logprob of each target under the rollout engine."""
    old_logprob_T: torch.Tensor | None = None
    """Logprob of each target at the start of the step, if it takes a forward pass of its own."""
    ref_logprob_T: torch.Tensor | None = None
    """Logprob of each target under the reference model, if the step needs it."""
    logprob_scale_T: torch.Tensor | None = None
    """Factor on the logprob of each target in the policy loss. None means 1."""
    on_policy_T: torch.Tensor | None = None
    """bool: the weights at the start of the step sampled the target. None means True everywhere."""
    old_value_T: torch.Tensor | None = None
    """Value estimates of the critic at the start of the step."""
    return_T: torch.Tensor | None = None
    """Targets of the critic."""

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, padding included."""
        return self.token_T.numel()


@dataclass(slots=True, frozen=True, kw_only=True)
class ValueLossInputs:
    """Inputs of the value loss: one row for the state before each sampled token of a micro-batch.

    Values and returns are in the units of the value head (ValueHead), which may be normalized.
    """

    value_R: torch.Tensor
    """Value estimate of the critic, with gradient."""
    old_value_R: torch.Tensor
    """Value estimate at the start of the step."""
    return_R: torch.Tensor
    """Target of the critic."""
    weight_R: torch.Tensor
    """Weight of each token, as LossInputs.weight_R."""
    turn_R: torch.Tensor
    """Number of each token's turn, as LossInputs.turn_R."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """Return a bool tensor for each input by name: True if all its values are finite."""
        columns = {"the return": self.return_R, "the value": self.value_R}
        return {name: column.isfinite().all() for name, column in columns.items()}


@dataclass(slots=True, frozen=True, kw_only=True)
class LossInputs:
    """Inputs of the policy loss: one row per sampled token of a micro-batch, in order.

    All tensors are float32, except sequence_R and turn_R (integers) and on_policy_R (bool).
    Example: the micro-batch in the docstring of `MicroBatch` has the R = 3 rows 1, 2 and 4:

        rollout_logprob_R  [-0.3 -1.2 -0.7]        advantage_R  [0.5 0.5 -1]
        sequence_R         [0 0 1]                 weight_R     [1 1 1]
        turn_R             [0 0 1]
    """

    logprob_R: torch.Tensor
    """Logprob of each token under the weights in training, with gradient."""
    entropy_R: torch.Tensor
    """Entropy of each token's distribution under the weights in training, with gradient."""
    old_logprob_R: torch.Tensor
    """Logprob of each token at the start of the step. It is logprob_R, detached, if the step makes
    one update or if the rollout correction bypasses old logprobs.
    """
    rollout_logprob_R: torch.Tensor
    """Logprob of each token under the rollout engine that sampled it."""
    ref_logprob_R: torch.Tensor | None
    """Logprob of each token under the reference model, if the step needs it."""
    advantage_R: torch.Tensor
    """Advantage of each token."""
    weight_R: torch.Tensor
    """Weight of each token in the loss, before the division by the global denominator."""
    sequence_R: torch.Tensor
    """Number of each token's sequence in the micro-batch."""
    turn_R: torch.Tensor
    """Number of each token's turn in the micro-batch, from 0. A turn is the sampled tokens between
    two observations.
    """
    logprob_scale_R: torch.Tensor | None = None
    """Factor on each token's logprob in the policy loss. None means 1."""
    on_policy_R: torch.Tensor | None = None
    """bool: the token was sampled by the weights at the start of the step, so that
    rollout_logprob_R and old_logprob_R differ by numerics only. None means all tokens were.
    """
    values: ValueLossInputs | None = None
    """Inputs of the value loss if the critic shares the policy's backbone; None otherwise."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """Return a bool tensor for each input by name: True if all its values are finite.

        Inputs that come from outside the current forward pass are listed first, so the first failed
        check names the origin.
        """
        columns = {
            "the engine's logprob": self.rollout_logprob_R,
            "the reference's logprob": self.ref_logprob_R,
            "the advantage": self.advantage_R,
            "the trainer's logprob": self.logprob_R,
            "the old logprob": self.old_logprob_R,
            "the entropy": self.entropy_R,
        }
        found = {name: column.isfinite().all() for name, column in columns.items() if column is not None}
        return found | (self.values.finite_checks() if self.values else {})


@dataclass(slots=True, frozen=True)
class LossMetrics:
    """Detached scalars, sorted by their reduction over micro-batches and ranks.

    The names do not depend on the data.
    """

    sums: dict[str, torch.Tensor]
    """Summed values; divided by the global number of sampled tokens they are unweighted means or
    fractions of tokens.
    """
    maxima: dict[str, torch.Tensor]
    """Values reduced by the maximum, which is NaN if any value is. All are at least 0."""
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parts of the loss: summed, then divided by the global denominator like the loss itself."""
    checks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps each tensor of the micro-batch to True if it is finite, in order of computation."""
    histograms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Counts by size [bins] (io/histogram.py): summed, then NAME_p99 is read from the total.
    NAME_max is in `maxima`.
    """


Loss = Callable[[LossInputs], tuple["torch.Tensor", LossMetrics]]
"""Loss of a micro-batch, summed over its rows and not divided, with its metrics."""
ValueLoss = Callable[[ValueLossInputs], tuple["torch.Tensor", LossMetrics]]
"""Value loss of a micro-batch, summed over its rows and not divided, with its metrics."""
