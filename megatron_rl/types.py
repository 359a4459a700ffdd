"""The two records that travel: Rollout, what people and judges read, and Batch, what the trainer computes on.

Over 300 lines: the records, and the words that all rooms share, are one vocabulary.

Shape suffixes used in this project:
    T  tokens of one packed micro-batch        S  segments in it (S1 = S + 1)       L  tokens of one context
    P  vision patches    C  numbers in a patch (of its channels, frames, rows and columns)    I  images
    M  vision tokens after merging (a square of patches is one)    R  rows that need logits: the sampled tokens
    H  hidden size    G  rollouts of a group    V  ids of the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # environments and rewards make these records too, and need no torch for it
    import torch
    from PIL.Image import Image as Picture


Message = Mapping[str, object]
"""One of a conversation, as Hugging Face chat templates have them: {"role": ..., "content": text or parts}, a part being
{"type": "text", "text": ...} or {"type": "image", "image": a PIL picture}."""


class Status(StrEnum):
    """How an episode ended, as far as credit is concerned."""

    COMPLETED = "completed"
    """The environment or the policy ended it; scored and trained on."""
    TRUNCATED = "truncated"
    """The policy's budget (turns, tokens) ran out; scored and trained on."""
    FAILED = "failed"
    """Our fault: the engine, a tool or a judge was down. Never scored, never trained on, counted."""


class StopReason(StrEnum):
    """Why an episode was over. All but `done`, `tool_error` and the faults are budgets of the policy that ran out."""

    DONE = "done"
    """The policy answered, or the environment reached its end."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The context had no room for another turn, or for the observation."""
    MAX_IMAGES = "max_images"
    MAX_PIXELS = "max_pixels"
    MAX_SECONDS = "max_seconds"
    TOOL_ERROR = "tool_error"
    """A call went wrong where that ends episodes (task.stop_on_tool_error)."""
    INFRA_ERROR = "infra_error"
    """Ours (InfraError): the rollout is failed."""
    PERMANENT_INFRA_ERROR = "permanent_infra_error"
    """Ours too (PermanentInfraError), and the same whenever it is played."""
    INFRA_TIMEOUT = "infra_timeout"
    """Ours too (InfraTimeout), behind as long a wait as there may be."""
    ACCESS_DENIED = "access_denied"
    """Ours too (AccessDenied): the run ends."""


@dataclass(slots=True, frozen=True)
class Example:
    """One start of an episode. Its payload is the task's own business."""

    id: str
    payload: Mapping[str, object]
    probability: float | None = None
    """How often the task deals this example, where that is known: evaluation then weights by it."""
    where: str = ""
    """File and row that it was read from, for messages: `train.jsonl row 17`."""
    source: str = ""
    """The data that it is of, where a task mixes several: its metrics are told apart."""

    def __str__(self) -> str:
        """Example: `example train/17 (train.jsonl row 17)`."""
        return f"example {self.id}" + (f" ({self.where})" if self.where else "")


@dataclass(slots=True, frozen=True)
class Demonstration:
    """A transcript for the supervised warm start: loss on the assistant's messages, on nothing else.

    A message of the assistant with "loss": False is in the context and not learned.
    """

    messages: list[Message]
    where: str = ""
    """File and row that it was read from, for messages: `t.jsonl row 17`."""


@dataclass(slots=True, frozen=True)
class Image:
    """A picture at its final size, with the patches both sides see. Equal pixels have equal keys."""

    pil: Picture | None
    """None where another rank has it (distributed/image_exchange.py), or where it was read without its pixels
    (io/rollout_codec.from_record)."""
    patch_PC: torch.Tensor | None
    """float32 [P, C], the output of the one processor call: what an engine is given. It takes eight times the picture's size, and is None
    once the episode is over; Renderer.patches makes it again."""
    grid: tuple[int, int, int]
    """Frames, rows and columns in patches; rows and columns are multiples of `merge`."""
    key: str
    merge: int
    """Patches along each side of the square that is one vision token."""

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns // self.merge**2

    @property
    def num_patches(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    def without_patches(self) -> Image:
        return replace(self, patch_PC=None)


@dataclass(slots=True)
class TokenSequence:
    """Token ids as the engine saw and sampled them, with everything that is aligned to them.

    Example: prompt ids [5, 6], sampled [7, 8] gives
        token_ids [5, 6, 7, 8], loss_mask [0, 0, 1, 1], rollout_logprobs [0.0, 0.0, -0.3, -1.2], weight_versions [-1, -1, 4, 4].
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the policy that sampled it; 0.0 where the mask is 0."""
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token; -1 where the mask is 0."""
    images: list[Image] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the sampled tokens under the trainer's weights at the start of the step. Empty until known, as those below."""
    reference_logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """What a critic expects to be earned from the state before each sampled token."""
    advantages: list[float] = field(default_factory=list)
    """What each sampled token is credited with; 0.0 where the mask is 0."""
    returns: list[float] = field(default_factory=list)
    """What a critic should have expected there: its target."""
    logprob_scale: list[float] = field(default_factory=list)
    """Factor on each sampled token's logprob in the surrogate (algo.thought_logprob_scale); empty: 1 everywhere."""
    entropies: list[float] = field(default_factory=list)
    """Entropy, in nats, of the distribution that the trainer gave each sampled token when it was first trained on
    (batching/token_stats.py)."""

    def extend(
        self, token_ids: list[int], *,
        logprobs: list[float] | None = None, versions: list[int] | None = None, images: tuple[Image, ...] = (),
    ) -> None:  # fmt: skip
        """The only door through which tokens enter. With logprobs they were sampled, by weights of these versions (0: before any update);
        without, they were observed.

        Image placeholders in token_ids are already expanded: one id per vision token.
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
        """The only door for what becomes known of the tokens later: `column` is one of TOKEN_COLUMNS, with a number for every token."""
        assert column in TOKEN_COLUMNS, f"{column} is none of {TOKEN_COLUMNS}"
        assert len(numbers) == len(self.token_ids), f"{len(numbers)} {column} for {len(self.token_ids)} tokens"
        setattr(self, column, numbers)


TOKEN_COLUMNS = ("old_logprobs", "reference_logprobs", "values", "advantages", "returns", "logprob_scale", "entropies")
"""Columns of TokenSequence that networks and credit fill."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolCall:
    """What a reply asked to be done, and what came of it in words. The pictures that came back are in Turn.images."""

    tool: str
    """`python`, `zoom`, `move`, ..."""
    source: str
    """The code, or the arguments as JSON."""
    text: str = ""
    """What the policy was told."""
    error: str = ""
    """Why it went wrong, by the policy's own doing; empty when it did not."""
    ran: bool = True
    """It was executed: the reply could be read and the tool exists."""
    frame: tuple[int, int] | None = None
    """Width and height of the picture in whose pixels a box of `source` is given, which the policy may have been shown smaller. None for
    tools that take no box."""


@dataclass(slots=True, frozen=True, kw_only=True)
class JudgeResult:
    """What a judge said of an episode: its prompts let it answer nothing but a number."""

    judge: str
    """The model."""
    prompt: str
    """Name and version."""
    value: float
    turn: int | None = None
    """Index into Rollout.turns of the one that it is about; None: of the whole."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds from the question to the answer: waits, and tries that failed, included."""
    reasoning: str = field(default="", compare=False)
    """What it thought before it answered, where its server gives that beside the answer: the beginning. Empty where the verdict is an older
    one's of task.judge.cache."""


@dataclass(slots=True)
class Turn:
    """One reply of the policy and what came of it."""

    sequence: int
    """Index into Rollout.sequences."""
    token_span: tuple[int, int]
    """First and one-past-last sampled token in that context."""
    text: str
    action_start: int | None = None
    """Position in the sequence of the token at which the action begins, behind the thoughts; None where the environment sets no
    rollout.task.Step.action_char."""
    reward: float = 0.0
    """What the environment gave."""
    step_score: float | None = None
    """What this turn is worth as a step, by the rubric's turn parts, weighted; None where it is no step of any of them."""
    reward_delta: float = 0.0
    """What this turn changed in the episode's reward: the gains and Rollout.outcome_reward sum to the reward."""
    tool_call: ToolCall | None = None
    images: list[Image] = field(default_factory=list)
    """Pictures of the observation that followed, as the policy saw them."""
    state: str = ""
    """What the environment calls the state that the reply answers (Env.state); empty where it does not say."""
    generation_s: float = field(default=0.0, compare=False)
    """Seconds until the policy had replied."""
    env_s: float = field(default=0.0, compare=False)
    """Seconds of the environment's step that answered it: its tool, with the wait for a free one."""


@dataclass(slots=True)
class Rollout:
    """One episode: printable, on CPU, complete enough to be replayed into training."""

    task: str
    example_id: str
    group: int
    """Rollouts of one group start from the same example and share a baseline."""
    sample_index: int
    source: str = ""
    """Example.source."""
    question: str = ""
    """The question of the data set, with <image> for each picture; empty for tasks without questions (games)."""
    answer: str = ""
    """The reference answer; empty if the task has none."""
    extra: str = ""
    """Other fields of the example as one JSON object, without pictures (rollout/example_fields.py); empty if there are none."""
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.COMPLETED
    stop_reason: StopReason = StopReason.DONE
    reason: str = ""
    """In words: 'goal', or the message of the error that failed it."""
    reward: float | None = None
    """None until scored; stays None when failed."""
    outcome_reward: float = 0.0
    """The reward without what its turns contributed."""
    filter_reason: str = ""
    """Why a rollout that was scored is not trained on (algo/filtering.py); empty when it is."""
    reward_terms: dict[str, float] = field(default_factory=dict)
    """The reward by named part, unweighted."""
    verdicts: list[JudgeResult] = field(default_factory=list)
    """What judges were asked for the reward and said: the turns' first, in their order."""
    wall_s: float = 0.0
    """Seconds of the episode, from its prompt to the end of its environment, with those of the tries before it that failed."""
    env_s: float = 0.0
    """Seconds of wall_s in the steps of its environment: tools, with the wait for a free one."""
    scoring_s: float = 0.0
    """Seconds of wall_s in its rubric: judges."""

    @property
    def images(self) -> list[Image]:
        """Of its contexts and of its turns' observations; most are met several times."""
        return [image for each in (*self.sequences, *self.turns) for image in each.images]

    def drop_patches(self) -> None:
        """What is left of a picture is the picture."""
        for each in (*self.sequences, *self.turns):
            each.images = [image.without_patches() for image in each.images]

    @property
    def num_sampled(self) -> int:
        return sum(sum(context.loss_mask) for context in self.sequences)

    @property
    def used_tool(self) -> bool:
        """A tool was called and did what it was asked."""
        return any(turn.tool_call is not None and turn.tool_call.ran and not turn.tool_call.error for turn in self.turns)

    @property
    def is_scored(self) -> bool:
        return self.status is not Status.FAILED

    @property
    def is_trained_on(self) -> bool:
        return self.is_scored and not self.filter_reason

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that sampled any of its tokens; -1 without one."""
        return min((version for context in self.sequences for version in context.weight_versions if version >= 0), default=-1)


@dataclass(slots=True, frozen=True)
class SegmentSource:
    """Whose tokens a segment holds."""

    rollout: int
    """Index into the rollouts that were packed."""
    sequence: int
    """Index into that rollout's contexts."""
    start: int
    """Where in the context the segment begins."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch: flat tensors, no padding between segments; knows no prompts, tasks, groups or algorithms.

    Entry t predicts token t + 1: target_T, mask_T, weight_T and every *_T quantity of the loss are already shifted by `pack`.
    Contexts [5 6 7 8] (7 and 8 sampled) and [9 4] (4 sampled) give
        token_T [5 6 7 8 9 4], target_T [6 7 8 0 4 0], mask_T [0 1 1 0 1 0], cu_seqlens_S1 [0 4 6].
    """

    token_T: torch.Tensor
    target_T: torch.Tensor
    mask_T: torch.Tensor
    """bool: the target was sampled by the policy (or, in the warm start, written by the demonstrator)."""
    weight_T: torch.Tensor
    """float32: what the loss of entry t counts, before the division by the global denominator; 0 where mask_T is False."""
    position_3T: torch.Tensor
    """Rotary positions: frame, row, column."""
    sequence_T: torch.Tensor
    """Which context of the micro-batch entry t is of, from 0; the first of those that share it. The entries of one are neighbors."""
    cu_seqlens_S1: torch.Tensor
    """int32 offsets; the last equals T."""
    offset_S1: list[int]
    """The same on the host: a layer that asked the device for them would wait for all that stands before it."""
    prefix_S: list[int]
    """For each segment the earlier one that it continues, or -1. What several contexts begin with is one segment, and each continues it
    with its own: a tree."""
    origin_S: list[SegmentSource | None]
    """The way back: whose tokens each segment holds, the first's of those that share it. None for padding, and outside of rollouts."""
    images: list[Image]
    """The distinct ones of the micro-batch: each is encoded once however many contexts show it."""
    patch_PC: torch.Tensor | None = None
    """Of the images that this rank encodes (policy/patches.py). A step's are larger than its weights: they are made, on the host, when the
    micro-batch is about to run, and are None before and after."""
    grid_I3: torch.Tensor
    """Of `images`: frames, rows and columns in patches. On the host, as what is made of it."""
    vision_position_M: torch.Tensor
    """Positions in token_T that a vision embedding replaces, in order."""
    vision_row_M: torch.Tensor
    """The row of the encoder's output that goes to each of vision_position_M."""
    denominator: int
    """This micro-batch's share of the global denominator: shares are summed over micro-batches and data-parallel ranks."""
    advantage_T: torch.Tensor
    rollout_logprob_T: torch.Tensor
    old_logprob_T: torch.Tensor | None = None
    ref_logprob_T: torch.Tensor | None = None
    logprob_scale_T: torch.Tensor | None = None
    on_policy_T: torch.Tensor | None = None
    """bool: the target was sampled by the weights that the step begins with. None: all were."""
    old_value_T: torch.Tensor | None = None
    """A critic's values at the start of the step, and its targets."""
    return_T: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_T.numel()


@dataclass(slots=True, frozen=True, kw_only=True)
class ValueLossInputs:
    """What a critic's loss sees of the R sampled tokens: numbers about the state before each. In the head's units (ValueHead)."""

    value_R: torch.Tensor
    """The critic's value, with gradient."""
    old_value_R: torch.Tensor
    """Its value at the start of the step."""
    return_R: torch.Tensor
    """Its target."""
    weight_R: torch.Tensor
    """LossInputs.weight_R."""
    turn_R: torch.Tensor
    """LossInputs.turn_R."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """See LossInputs.finite_checks."""
        columns = {"the return": self.return_R, "the value": self.value_R}
        return {name: column.isfinite().all() for name, column in columns.items()}


@dataclass(slots=True, frozen=True, kw_only=True)
class LossInputs:
    """What a loss sees of a micro-batch: its R sampled tokens, in order. All float32 but context_R, turn_R and current_R."""

    logprob_R: torch.Tensor
    """Logprob of each token under the weights that are trained, with gradient."""
    entropy_R: torch.Tensor
    """Entropy of the distribution that each token is from, with gradient."""
    old_logprob_R: torch.Tensor
    """Logprob at the start of the step: logprob_R itself, detached, where the step makes one update or asks for none (bypass)."""
    rollout_logprob_R: torch.Tensor
    """Logprob under the engine that sampled."""
    ref_logprob_R: torch.Tensor | None
    advantage_R: torch.Tensor
    weight_R: torch.Tensor
    """What a token's loss counts, before the division by the global denominator."""
    sequence_R: torch.Tensor
    """Which context of the batch a token is of."""
    turn_R: torch.Tensor
    """Which turn of the batch a token is in, from 0: the sampled tokens between two observations."""
    logprob_scale_R: torch.Tensor | None = None
    """Factor on the token's logprob in the surrogate; None: 1."""
    on_policy_R: torch.Tensor | None = None
    """bool: a token was sampled by the weights that the step begins with, so that rollout_logprob_R is old_logprob_R; None: all were."""
    values: ValueLossInputs | None = None
    """Of a critic that shares the policy's trunk."""

    def finite_checks(self) -> dict[str, torch.Tensor]:
        """Whether each column holds finite numbers only, by its name in words; what others computed comes first."""
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
    """Detached scalars, sorted by how they are reduced over micro-batches and ranks. The names do not depend on the data."""

    sums: dict[str, torch.Tensor]
    """Add, then divide by the global number of sampled tokens: a mean or a fraction of tokens, unweighted."""
    maxima: dict[str, torch.Tensor]
    """Take the maximum, which is NaN where any is. At least 0."""
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parts of the loss: add, then divide by the global denominator as the loss itself is."""
    checks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whether a tensor of the micro-batch holds finite numbers only, in the order in which they came to be."""
    histograms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Counts by size [bins] (io/histogram.py): add, then read NAME_p99 off the sum. NAME_max is among the maxima."""


Loss = Callable[[LossInputs], tuple["torch.Tensor", LossMetrics]]
"""The loss of a micro-batch, summed over its rows and not divided, and its metrics."""
ValueLoss = Callable[[ValueLossInputs], tuple["torch.Tensor", LossMetrics]]
"""The same of a critic."""
