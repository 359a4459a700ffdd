"""Data records shared by rollout generation and training, such as `Rollout` and `MicroBatch`.

Shape suffixes of tensor names:

    T  tokens in a micro-batch    S  segments of a micro-batch (S1 = S + 1)
    L  tokens in a sequence
    P  vision patches    C  values per patch (channels x frames x rows x columns)    I  images
    M  vision tokens after merging (one token per square of patches)
    R  rows that need logits: the positions with a sampled target
    H  hidden size    G  rollouts in a group    V  vocabulary size
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environments and rewards create these records without importing torch
    import torch
    from PIL.Image import Image as Picture


Message = Mapping[str, Any]
"""One chat message in the format of Hugging Face chat templates: {"role": ..., "content": ...}. The
content is a string or a list of parts. A part is {"type": "text", "text": ...} or
{"type": "image", "image": a PIL image}. An assistant message may have `tool_calls`, and the first
message of a prompt `tools`, both in the format of OpenAI's API with the arguments as an object.
"""


ACCURACY_TERM = "accuracy"
"""Name of the reward term that contains a rollout's score, if the task has one."""


class Status(StrEnum):
    """Status of an episode, which determines whether the episode is scored and trained on."""

    COMPLETED = "completed"
    """The environment or the policy ended the episode. The episode is scored and trained on."""
    TRUNCATED = "truncated"
    """The policy exceeded a limit on turns, tokens, images, pixels or seconds, or the environment
    truncated the episode. The episode is scored and trained on.
    """
    FAILED = "failed"
    """An infrastructure error occurred in the engine, a tool or a judge. The episode appears in the
    metrics, but it is never scored or trained on.
    """


class StopReason(StrEnum):
    """Reason why an episode ended. `MAX_*` members stand for limits that the policy exceeded."""

    DONE = "done"
    """The policy gave its final answer, or the environment reached a terminal state."""
    ENV_TRUNCATED = "env_truncated"
    """The environment ended the episode in a state that is not terminal, e.g. at its own limit on
    the number of steps.
    """
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The sequence had no room for another response or for the next observation."""
    MAX_IMAGES = "max_images"
    MAX_PIXELS = "max_pixels"
    MAX_SECONDS = "max_seconds"
    TOOL_ERROR = "tool_error"
    """A tool call failed and task.stop_on_tool_error is set."""
    INFRA_ERROR = "infra_error"
    """InfraError was raised. A retry may succeed."""
    PERMANENT_INFRA_ERROR = "permanent_infra_error"
    """PermanentInfraError was raised. A retry cannot succeed."""
    INFRA_TIMEOUT = "infra_timeout"
    """InfraTimeout was raised: a service was unavailable for longer than the maximum wait."""
    ACCESS_DENIED = "access_denied"
    """AccessDenied was raised: a server rejected the run's key or token. The run stops."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SpecialTokens:
    """Token ids that the engine and the trainer must treat in the same way."""

    image_token_id: int
    """Id of the image placeholder token."""
    banned_ids: Sequence[int] = ()
    """Ids of tokens that are never sampled; their probability is 0."""
    stop_ids: Sequence[int] = ()
    """Ids of the stop tokens, which end a turn."""


@dataclass(slots=True, frozen=True)
class Example:
    """Dataset example from which episodes are started. Only the task interprets the payload."""

    id: str
    payload: Mapping[str, Any]
    probability: float | None = None
    """Probability of drawing this example, or None if unknown. Evaluation weights the example's
    results by this probability.
    """
    where: str = ""
    """File and row of the example, for error messages. Example: `train.jsonl row 17`."""
    source: str = ""
    """Name of the example's data source, for metrics per source."""

    def __str__(self) -> str:
        """Return a short name for messages, such as `example train/17 (train.jsonl row 17)`."""
        return f"example {self.id}" + (f" ({self.where})" if self.where else "")


@dataclass(slots=True, frozen=True)
class Demonstration:
    """A transcript for supervised fine-tuning, with loss on assistant messages only.

    An assistant message whose field "loss" is False stays in the sequence, but its tokens have no
    loss.
    """

    messages: list[Message]
    where: str = ""
    """File and row of the transcript, for error messages. Example: `t.jsonl row 17`."""


@dataclass(slots=True, frozen=True)
class Image:
    """An image at its final size, with the patches that rollout engine and trainer use.

    Images with equal pixels have equal keys.
    """

    pil: Picture | None
    """PIL image. None if the pixels are on another rank (distributed/image_exchange.py) or if the
    record was loaded without pixels (io/rollout_codec.from_record).
    """
    patch_PC: torch.Tensor | None
    """float32 [P, C] output of the image processor. The image is processed once, and the engine
    receives this same tensor. None after the episode, because the patches take eight times the
    memory of the pixels; Renderer.patches recomputes them.
    """
    grid: tuple[int, int, int]
    """Number of frames, patch rows and patch columns. Rows and columns are multiples of `merge`."""
    key: str
    merge: int
    """Side length, in patches, of the square that is merged into one vision token."""

    @property
    def num_tokens(self) -> int:
        """Number of vision tokens, which equals the number of placeholder ids in the sequence."""
        frames, rows, columns = self.grid
        return frames * rows * columns // self.merge**2

    @property
    def num_patches(self) -> int:
        """Number of patches before merging."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def num_pixels(self) -> int:
        """Width times height of `pil`, which must not be None."""
        assert self.pil is not None
        return self.pil.width * self.pil.height

    def without_patches(self) -> Image:
        """Return a copy without `patch_PC`."""
        return replace(self, patch_PC=None)


@dataclass(slots=True, frozen=True)
class TopTokens:
    """A teacher's most probable tokens at each sampled token of a sequence, from a server.

    Example: top_k=2 and two sampled tokens; the server returned a single token for the second one:

        token_ids  [7, 3, 9, -1]        logprobs  [-0.1, -2.5, -0.01, -inf]
    """

    top_k: int
    token_ids: array[int]
    """top_k ids for each sampled token, flat; -1 where the server returned fewer."""
    logprobs: array[float]
    """Logprob of each id under the teacher."""


@dataclass(slots=True)
class TokenSequence:
    """Token ids of one context window, with lists of per-token values aligned to the token ids.

    Example for prompt ids [5, 6] and sampled ids [7, 8] with weight version 4:

        token_ids         [5,   6,   7,    8]
        loss_mask         [0,   0,   1,    1]
        rollout_logprobs  [0.0, 0.0, -0.3, -1.2]
        weight_versions   [-1,  -1,  4,    4]
        advantages        [0.0, 0.0, 0.5,  0.5]      written later, by the advantage function
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the weights that sampled it; 0.0 where loss_mask is 0."""
    weight_versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token; -1 where loss_mask is 0."""
    images: list[Image] = field(default_factory=list)
    routed_experts: list[bytes] = field(default_factory=list)
    """Experts that the engine used for the first tokens of the sequence, one row for each token
    (policy/routed_experts.py). The last sampled token has no row, because the engine has not
    computed it. The list is empty if the engine does not record experts (algo.routing_replay).
    """
    old_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the trainer's weights at the start of the step. The list
    is empty until computed.
    """
    reference_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the reference model. The list is empty until computed."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the teacher. The list is empty until computed."""
    values: list[float] = field(default_factory=list)
    """Critic's value of the state before each sampled token. The list is empty until computed."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each sampled token; 0.0 where loss_mask is 0. The list is empty until computed.
    """
    returns: list[float] = field(default_factory=list)
    """Critic's target for the state before each sampled token. The list is empty until computed."""
    logprob_scale: list[float] = field(default_factory=list)
    """Factor for each sampled token's logprob in the policy loss (algo.thought_logprob_scale). An
    empty list means a factor of 1 for every token.
    """
    entropies: list[float] = field(default_factory=list)
    """Entropy in nats of the trainer's next-token distribution for each sampled token, computed in
    the first update that trains on the token (batching/token_stats.py). The list is empty if
    entropies are not recorded.
    """
    teacher_top: TopTokens | None = None
    """Most probable tokens of a teacher on servers; None without distill.support=top_k.

    They are not recorded.
    """

    def extend(
        self, token_ids: list[int], *,
        logprobs: list[float] | None = None, versions: list[int] | None = None, images: tuple[Image, ...] = (),
    ) -> None:  # fmt: skip
        """Append tokens; pass `logprobs` for sampled tokens only.

        This is the only method that adds tokens to a sequence. Image placeholders in `token_ids`
        must already be expanded to one id per vision token.

        Args:
            token_ids: Token ids to append.
            logprobs: Logprob of each token under the weights that sampled it. Tokens with logprobs
                get loss mask 1, all others 0.
            versions: Weight version of each sampled token. None means version 0, the weights before
                any update. Must be None for observed tokens.
            images: Images of the placeholders in `token_ids`, in order. Must be empty for sampled
                tokens.
        """
        sampled = logprobs is not None
        assert not (sampled and images), "the policy does not sample images"
        assert sampled or versions is None, "observed tokens have no weight version"
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([int(sampled)] * len(token_ids))
        self.rollout_logprobs.extend(logprobs if sampled else [0.0] * len(token_ids))
        self.weight_versions.extend([0 if sampled else -1] * len(token_ids) if versions is None else versions)
        self.images.extend(images)
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs), len(self.weight_versions))
        assert len(set(lengths)) == 1, f"token_ids, loss_mask, rollout_logprobs, weight_versions have lengths {lengths}"

    def exclude_from_loss(self, start: int, stop: int) -> None:
        """Turn the sampled tokens [start, stop) into observed tokens."""
        length = stop - start
        self.loss_mask[start:stop] = [0] * length
        self.rollout_logprobs[start:stop] = [0.0] * length
        self.weight_versions[start:stop] = [-1] * length

    def set_column(self, column: str, numbers: list[float]) -> None:
        """Set the field named `column`, one of TOKEN_COLUMNS; `numbers` has one entry per token."""
        assert column in TOKEN_COLUMNS, f"{column} is not one of {TOKEN_COLUMNS}"
        assert len(numbers) == len(self.token_ids), f"{len(numbers)} {column} for {len(self.token_ids)} tokens"
        setattr(self, column, numbers)


TOKEN_COLUMNS = (
    "old_logprobs", "reference_logprobs", "teacher_logprobs", "values", "advantages", "returns", "logprob_scale", "entropies"
)  # fmt: skip
"""Names of the TokenSequence fields that are filled after the rollout, by models and advantage
functions.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolCall:
    """A tool call in a response, with its text result. Images in the result are in Turn.images."""

    tool: str
    """Name of the tool, such as `python`, `zoom` or `move`."""
    source: str
    """Code to execute, or the arguments of the call as JSON."""
    text: str = ""
    """Result text that was returned to the policy."""
    error: str = ""
    """Error message if the call failed because of the policy; empty if the call succeeded."""
    ran: bool = True
    """True if the call was executed. False if the response could not be parsed or the tool does not
    exist.
    """
    frame: tuple[int, int] | None = None
    """Width and height, in pixels, of the image that the box coordinates in `source` refer to. The
    policy may have received a smaller version of this image. None for tools without a box argument.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class JudgeResult:
    """Score that a judge model assigned to an episode or a turn.

    Every judge prompt asks for a single number as the answer.
    """

    judge: str
    """Name of the judge model."""
    prompt: str
    """Name and version of the judge prompt."""
    value: float
    turn: int | None = None
    """Index of the judged turn in Rollout.turns; None if the whole episode was judged."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds from the request to the answer, including queueing and failed attempts."""
    reasoning: str = field(default="", compare=False)
    """Beginning of the judge's reasoning, if the judge server returns the reasoning separately from
    the answer. Empty if the verdict comes from a task.judge.cache entry without reasoning.
    """
    rule_score: float | None = None
    """Score of the rules for the same answer, in an audit (task.judge.audit_fraction)."""
    is_reward: bool = True
    """False if the verdict is only compared with the rules, which determine the reward."""


@dataclass(slots=True)
class Turn:
    """One response of the policy, with its tool call, observation and rewards."""

    sequence: int
    """Index in Rollout.sequences of the sequence that contains the response."""
    token_span: tuple[int, int]
    """Half-open range [start, stop) of the response's tokens in the sequence."""
    text: str
    """Text of the response."""
    action_start: int | None = None
    """Position in the sequence of the first action token, which comes after the thoughts. None if
    the environment does not set rollout.task.Step.action_char.
    """
    reward: float = 0.0
    """Reward that the environment returned for this turn."""
    step_score: float | None = None
    """Weighted sum of the rubric's turn terms for this turn; None if no turn term scores this turn.
    """
    reward_delta: float = 0.0
    """Contribution of this turn to the episode's reward. The contributions of all turns plus
    Rollout.outcome_reward equal Rollout.reward.
    """
    tool_call: ToolCall | None = None
    images: list[Image] = field(default_factory=list)
    """Images in the observation after the response, as the policy received them."""
    state: str = ""
    """Name of the environment state before the response (Env.state); empty if the environment does
    not name its states.
    """
    generation_s: float = field(default=0.0, compare=False)
    """Seconds from the generation request to the complete response."""
    env_s: float = field(default=0.0, compare=False)
    """Seconds spent in the environment step after the response, including the tool call and the
    wait for a free tool.
    """


@dataclass(slots=True)
class Rollout:
    """One episode with its tokens, turns and reward.

    A rollout is stored in host memory and contains all data needed to train on it again.

    Example: the policy zooms into the image of a question (turn 0), then answers (turn 1). Token id
    2 is the image placeholder. The question's image has two vision tokens and the zoomed crop has
    one. The rubric has two terms. The reward term "accuracy" has weight 1. The turn term "evidence"
    has weight 0.5, is averaged over the scored turns, and scores only turn 0.

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
    """Index of the rollout's group. Rollouts of one group start from the same example and share a
    baseline.
    """
    sample_index: int
    """Zero-based index of the rollout in its group."""
    source: str = ""
    """Data source of the example (Example.source)."""
    question: str = ""
    """Question from the dataset, with <image> in place of each image; empty for games."""
    answer: str = ""
    """Reference answer; empty if the task has none."""
    extra: str = ""
    """Other fields of the example as one JSON object, without images (rollout/example_fields.py);
    empty if the example has no other fields.
    """
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_state: TokenSequence | None = None
    """Context of the policy after the last observation, if the environment truncated the episode
    and algo.bootstrap_truncated is set; otherwise None. The context has one more token, the only
    one with loss mask 1, because a critic's values are computed at sampled tokens. It is not
    trained on.
    """
    status: Status = Status.COMPLETED
    stop_reason: StopReason = StopReason.DONE
    reason: str = ""
    """Environment's reason for ending the episode, such as 'goal', or its note on the last state if
    a limit of the policy ended the episode. The error message if the episode failed.
    """
    reward: float | None = None
    """Total reward of the episode. None before scoring, and always None for a failed episode."""
    outcome_reward: float = 0.0
    """Episode reward without the contributions of the turn terms."""
    filter_reason: str = ""
    """Name of the filter that excluded the scored rollout from training (algo/filtering.py); empty
    if the rollout is trained on.
    """
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward term, by name."""
    verdicts: list[JudgeResult] = field(default_factory=list)
    """Judge verdicts, used for the reward or in audits. Verdicts about single turns come first, in
    turn order.
    """
    wall_s: float = 0.0
    """Seconds from the prompt until the environment was closed, including earlier failed attempts.
    """
    env_s: float = 0.0
    """Part of `wall_s` spent in environment steps, including tool calls and waits for a free tool.
    """
    scoring_s: float = 0.0
    """Part of `wall_s` spent in the rubric, mostly waiting for judges."""

    @property
    def images(self) -> list[Image]:
        """Images of all sequences (also of the final state), followed by the images of all turns.

        Most images occur more than once in this list.
        """
        return [image for each in (*self.contexts, *self.turns) for image in each.images]

    @property
    def contexts(self) -> list[TokenSequence]:
        """All sequences, followed by the final state if there is one."""
        return self.sequences if self.final_state is None else [*self.sequences, self.final_state]

    def drop_patches(self) -> None:
        """Drop the patches of all images and keep the pixels."""
        for each in (*self.contexts, *self.turns):
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
        """Oldest weight version that sampled a token of the rollout; -1 if no token was sampled."""
        return min((version for context in self.sequences for version in context.weight_versions if version >= 0), default=-1)


@dataclass(slots=True, frozen=True)
class SegmentSource:
    """Rollout, sequence and start position from which a packed segment was taken."""

    rollout: int
    """Index of the rollout in the step's list of rollouts."""
    sequence: int
    """Index of the sequence in Rollout.sequences."""
    start: int
    """Position, in the sequence, of the segment's first token."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch: flat tensors without padding between segments.

    A micro-batch does not depend on tasks, groups or algorithms.

    Entry t predicts token t + 1: target_T, mask_T, weight_T and all other *_T inputs of the loss
    are already shifted by `pack`. Example: two rollouts have one sequence each. In [5 6 7 8],
    tokens 7 and 8 are sampled; in [9 4], token 4 is sampled. Packing them with
    batch.loss_agg_mode=token_mean results in

        token_T            [5   6    7    8   9    4]
        target_T           [6   7    8    0   4    0]
        mask_T             [0   1    1    0   1    0]        row_R         [1 2 4]
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
    """bool: True if the target was sampled by the policy or, in supervised fine-tuning, has a loss.
    """
    row_R: torch.Tensor
    """Positions at which mask_T is True. They are computed on the host, because reading them from
    mask_T would block the host until all queued kernels have finished.
    """
    weight_T: torch.Tensor
    """float32 weight of each target in the loss, before the division by the global denominator; 0
    where mask_T is False.
    """
    position_3T: torch.Tensor
    """Rotary position ids of each token: frame, row and column."""
    sequence_T: torch.Tensor
    """Zero-based sequence index of each entry, unique within the micro-batch. A token shared by
    several sequences has the index of the first sequence that contains the token. Entries with the
    same index are contiguous.
    """
    cu_seqlens_S1: torch.Tensor
    """int32 offsets of the segments; the last offset equals T."""
    offset_S1: list[int]
    """cu_seqlens_S1 as a list on the host. Reading the offsets from the device would block the host
    until all queued kernels have finished.
    """
    prefix_S: list[int]
    """Index of the earlier segment that each segment continues, or -1 if the segment starts a
    sequence. A prefix shared by several sequences is stored as one segment. The rest of each
    sequence continues this segment. The segments thus form a tree.
    """
    origin_S: list[SegmentSource | None]
    """Source of each segment in the rollouts, for mapping per-token results back to sequences. A
    shared segment refers to the first sequence that contains the segment. None for padding and for
    sequences that do not belong to a rollout.
    """
    num_sequences_S: list[int] = field(default_factory=list)
    """Number of sequences that contain each segment; 0 for padding."""
    images: list[Image]
    """Distinct images of the micro-batch. Each image is encoded once, even if several sequences use
    it.
    """
    patch_PC: torch.Tensor | None = None
    """Patches of the images that this rank encodes (policy/patches.py). The patches are computed on
    the host just before the micro-batch runs and are dropped afterwards, because all patches of a
    step would take more memory than the weights. None at all other times.
    """
    grid_I3: torch.Tensor
    """Number of frames, patch rows and patch columns of each image in `images`. This tensor and all
    values computed from it are on the host.
    """
    vision_position_M: torch.Tensor
    """Positions in token_T of the image placeholders, in order. Vision embeddings replace the token
    embeddings at these positions.
    """
    vision_row_M: torch.Tensor
    """Row of the vision encoder's output for each entry of vision_position_M."""
    denominator: int
    """Contribution of this micro-batch to the global denominator of the loss, which is the sum over
    all micro-batches and data-parallel ranks.
    """
    teacher: int = 0
    """Index of the teacher of all sequences (Policy.teachers); -1 if their data source has no
    teacher. Without effect if the step has no teacher.
    """
    is_demonstration: bool = False
    """True if the sequences are demonstrations among the rollouts of a step, on which the policy
    learns from the teacher alone (distill.data_fraction), or responses that the teacher generated
    (distill.apply_to=responses).
    """
    advantage_T: torch.Tensor
    """Advantage of each target; 0 where mask_T is False."""
    rollout_logprob_T: torch.Tensor
    """Logprob of each target under the rollout engine."""
    old_logprob_T: torch.Tensor | None = None
    """Logprob of each target under the weights at the start of the step. None if the step runs no
    separate forward pass for old logprobs.
    """
    ref_logprob_T: torch.Tensor | None = None
    """Logprob of each target under the reference model; None if no reference model is used."""
    teacher_logprob_T: torch.Tensor | None = None
    """Logprob of each target under the teacher; None without distillation."""
    teacher_hidden_RH: torch.Tensor | None = None
    """Final hidden states of the teacher at row_R, on the host. Only the last pipeline stage has
    them, and only if a divergence from the teacher is part of the loss.
    """
    teacher_batch: MicroBatch | None = None
    """The same sampled tokens in the same order, after prompts that only the teacher reads
    (distill.privileged_prompt). None if the teacher reads this micro-batch.
    """
    teacher_top_RK: tuple[torch.Tensor, torch.Tensor] | None = None
    """Ids and logprobs of the most probable tokens of a teacher on servers at row_R, on the host
    (TopTokens). None for a teacher in this process.
    """
    logprob_scale_T: torch.Tensor | None = None
    """Factor by which each target's logprob is multiplied in the policy loss. None means a factor
    of 1.
    """
    on_policy_T: torch.Tensor | None = None
    """bool: True if the target was sampled by the weights at the start of the step. None means True
    for all targets.
    """
    old_value_T: torch.Tensor | None = None
    """Critic's value estimate for each target at the start of the step; None without a critic."""
    return_T: torch.Tensor | None = None
    """Critic's regression target for each target token; None without a critic."""
    routed_experts_TLK: torch.Tensor | None = None
    """Experts that the policy's passes use for each token in each sparse layer (routing replay),
    uint8 or int16 [T, sparse layers, top_k]. In a row of equal numbers, the router chooses. None if
    the routers always choose.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the micro-batch, including padding."""
        return self.token_T.numel()


@dataclass(slots=True, frozen=True, kw_only=True)
class ValueLossInputs:
    """Inputs of the value loss, with one row per sampled token of a micro-batch.

    Each row refers to the state before the row's token. Values and returns are on the scale of the
    value head (ValueHead), which may be normalized.
    """

    value_R: torch.Tensor
    """Critic's value estimate, with gradient."""
    old_value_R: torch.Tensor
    """Critic's value estimate at the start of the step, without gradient."""
    return_R: torch.Tensor
    """Critic's regression target."""
    weight_R: torch.Tensor
    """Loss weight of each token, as in LossInputs.weight_R."""
    turn_R: torch.Tensor
    """Turn index of each token, as in LossInputs.turn_R."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """Return {input name: bool tensor}, with True if all values of the input are finite."""
        columns = {"the return": self.return_R, "the value": self.value_R}
        return {name: column.isfinite().all() for name, column in columns.items()}


@dataclass(slots=True, frozen=True, kw_only=True)
class LossInputs:
    """Inputs of the policy loss, with one row per sampled token of a micro-batch.

    All tensors are float32, except sequence_R and turn_R (integers) and on_policy_R (bool).
    Example: the micro-batch in the docstring of `MicroBatch` has R = 3 rows, for its entries 1, 2
    and 4:

        rollout_logprob_R  [-0.3 -1.2 -0.7]        advantage_R  [0.5 0.5 -1]
        sequence_R         [0 0 1]                 weight_R     [1 1 1]
        turn_R             [0 0 1]
    """

    logprob_R: torch.Tensor
    """Logprob of each token under the current weights, with gradient."""
    entropy_R: torch.Tensor
    """Entropy of the next-token distribution under the current weights, with gradient."""
    old_logprob_R: torch.Tensor
    """Logprob of each token under the weights at the start of the step. Equal to the detached
    logprob_R if the step makes only one update or if the rollout correction bypasses old logprobs.
    """
    rollout_logprob_R: torch.Tensor
    """Logprob of each token under the rollout engine, recorded when the token was sampled."""
    ref_logprob_R: torch.Tensor | None
    """Logprob of each token under the reference model; None if no reference model is used."""
    advantage_R: torch.Tensor
    """Advantage of each token."""
    weight_R: torch.Tensor
    """Loss weight of each token, before the division by the global denominator."""
    sequence_R: torch.Tensor
    """Zero-based sequence index of each token in the micro-batch."""
    turn_R: torch.Tensor
    """Zero-based turn index of each token in the micro-batch. A turn consists of the sampled tokens
    between two observations, and no two turns of a micro-batch share an index.
    """
    teacher_logprob_R: torch.Tensor | None = None
    """Logprob of each token under the teacher; None without distillation. If the data source of the
    tokens has no teacher, this is the detached logprob_R, and divergence_R is 0.
    """
    divergence_R: torch.Tensor | None = None
    """Divergence of the policy's next-token distribution from the teacher's, with gradient; None if
    the loss has no divergence over several outcomes (distill.support).
    """
    clipped_R: torch.Tensor | None = None
    """1.0 if distill.clip limits a term of the token's divergence, else 0.0; None if divergence_R
    is None.
    """
    logprob_scale_R: torch.Tensor | None = None
    """Factor by which each token's logprob is multiplied in the policy loss. None means a factor of
    1.
    """
    on_policy_R: torch.Tensor | None = None
    """bool: True if the token was sampled by the weights at the start of the step, so that
    rollout_logprob_R and old_logprob_R differ only by numerical error. None means True for all
    tokens.
    """
    is_demonstration: bool = False
    """True if the tokens are those of demonstrations, as in MicroBatch."""
    values: ValueLossInputs | None = None
    """Inputs of the value loss if the critic shares the policy's backbone, else None."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """Return {input name: bool tensor}, with True if all values of the input are finite.

        Inputs from outside the current forward pass come first, so the first failed check names the
        origin of a non-finite value.
        """
        columns = {
            "the engine's logprob": self.rollout_logprob_R,
            "the reference's logprob": self.ref_logprob_R,
            "the teacher's logprob": self.teacher_logprob_R,
            "the advantage": self.advantage_R,
            "the trainer's logprob": self.logprob_R,
            "the old logprob": self.old_logprob_R,
            "the entropy": self.entropy_R,
            "the divergence from the teacher": self.divergence_R,
        }
        found = {name: column.isfinite().all() for name, column in columns.items() if column is not None}
        return found | (self.values.finite_checks() if self.values else {})


@dataclass(slots=True, frozen=True)
class LossMetrics:
    """Detached metrics of a micro-batch, grouped by how they are reduced over batches and ranks.

    The metric names do not depend on the data.
    """

    sums: dict[str, torch.Tensor]
    """Values to be summed. Dividing a sum by the global number of sampled tokens yields an
    unweighted mean or a fraction of tokens.
    """
    maxima: dict[str, torch.Tensor]
    """Values to be reduced by maximum. All values are at least 0, and the maximum is NaN if any
    value is NaN.
    """
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Components of the loss. Like the loss, they are summed and divided by the global denominator.
    """
    checks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps the name of each checked tensor to a bool tensor, which is True if all checked values
    are finite. Names are in order of computation.
    """
    histograms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Histogram counts [bins] (io/histogram.py), keyed by metric name. The counts are summed, and
    the 99th percentile of the summed histogram is reported as NAME_p99. `maxima` contains NAME_max.
    """


Loss = Callable[[LossInputs], tuple["torch.Tensor", LossMetrics]]
"""(inputs) -> loss and metrics of a micro-batch. The loss is the sum over rows, before the division
by the global denominator.
"""
ValueLoss = Callable[[ValueLossInputs], tuple["torch.Tensor", LossMetrics]]
"""(inputs) -> value loss and metrics of a micro-batch. The loss is the sum over rows, before the
division by the global denominator.
"""
