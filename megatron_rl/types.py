"""The two records that travel: Rollout, what people and judges read, and Batch, what the trainer computes on.

Shape suffixes used in this project:
    T  tokens of one packed micro-batch        S  sequences in it (S1 = S + 1)      L  tokens of one sequence
    P  vision patches    C  numbers in a patch (3 channels x 2 frames x 14 x 14)    I  images
    V  vision tokens (a 2 x 2 square of patches is one)    R  rows that need logits    H  hidden size    G  rollouts of a group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # environments and rewards make these records too, and need no torch for it
    import torch
    from PIL.Image import Image as Picture


Message = Mapping[str, object]
"""One of a conversation, as Hugging Face chat templates have them: {"role": ..., "content": text or parts}, a part being
{"type": "text", "text": ...} or {"type": "image", "image": a PIL picture}."""


class HostFault(RuntimeError):
    """Something of ours broke (engine, sandbox, judge): it fails the rollout and is never a score."""


class RunFailed(RuntimeError):
    """The run did what it was told and the outcome is not acceptable: too many failed rollouts, no improvement."""


class Status(StrEnum):
    """How an episode ended, as far as credit is concerned."""

    COMPLETED = "completed"
    """The environment or the policy ended it; scored and trained on."""
    TRUNCATED = "truncated"
    """The policy's budget (turns, tokens) ran out; scored and trained on."""
    FAILED = "failed"
    """Our fault: the engine, a tool or a judge was down. Never scored, never trained on, counted."""


class End(StrEnum):
    """Why an episode was over. All but `done`, `tool_error` and `fault` are budgets of the policy that ran out."""

    DONE = "done"
    """The policy answered, or the environment reached its end."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The context had no room for another turn, or for the observation."""
    MAX_IMAGES = "max_images"
    MAX_PIXELS = "max_pixels"
    MAX_SECONDS = "max_seconds"
    TOOL_ERROR = "tool_error"
    """A call went wrong where that ends episodes (task.errors_end)."""
    FAULT = "fault"
    """Ours: the rollout is failed."""


@dataclass(slots=True, frozen=True)
class Example:
    """One start of an episode. Its payload is the task's own business."""

    id: str
    payload: Mapping[str, object]
    probability: float | None = None
    """How often the task deals this example, where that is known: evaluation then weights by it."""


@dataclass(slots=True, frozen=True)
class Demonstration:
    """A transcript for the supervised warm start: loss on the assistant's messages, on nothing else."""

    messages: list[Message]


@dataclass(slots=True, frozen=True)
class Image:
    """A picture at its final size, with the patches both sides see. Equal pixels have equal keys."""

    picture: Picture
    patch_PC: torch.Tensor | None
    """float32 [P, C], the output of the one processor call. It stays behind when an image is pickled (it is eight times the picture's
    size): None until Renderer.restore."""
    grid: tuple[int, int, int]
    """Frames, rows and columns in patches; rows and columns are even."""
    key: str

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns // 4

    def __reduce__(self) -> tuple:
        return Image, (self.picture, None, self.grid, self.key)


@dataclass(slots=True)
class Context:
    """Token ids as the engine saw and sampled them, with everything that is aligned to them.

    Example: prompt ids [5, 6], sampled [7, 8] gives
        token_ids [5, 6, 7, 8], loss_mask [0, 0, 1, 1], engine_logprobs [0.0, 0.0, -0.3, -1.2].
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the policy that sampled it; 0.0 where the mask is 0."""
    images: list[Image] = field(default_factory=list)

    def extend(self, token_ids: list[int], *, logprobs: list[float] | None = None, images: tuple[Image, ...] = ()) -> None:
        """The only door through which tokens enter. With logprobs they were sampled; without, they were observed.

        Image placeholders in token_ids are already expanded: one id per vision token.
        """
        sampled = logprobs is not None
        assert not (sampled and images), "the policy does not sample images"
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([int(sampled)] * len(token_ids))
        self.engine_logprobs.extend(logprobs if sampled else [0.0] * len(token_ids))
        self.images.extend(images)
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.engine_logprobs))
        assert len(set(lengths)) == 1, f"token_ids, loss_mask, engine_logprobs have lengths {lengths}"


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


@dataclass(slots=True)
class Turn:
    """One reply of the policy and what came of it."""

    context: int
    """Index into Rollout.contexts."""
    span: tuple[int, int]
    """First and one-past-last sampled token in that context."""
    text: str
    reward: float = 0.0
    """The environment's."""
    score: float = 0.0
    """What the rubric's turn parts give this turn, weighted."""
    call: ToolCall | None = None
    images: list[Image] = field(default_factory=list)
    """Those of the observation that followed, as the policy saw them."""


@dataclass(slots=True)
class Rollout:
    """One episode: printable, on CPU, complete enough to be replayed into training."""

    task: str
    example_id: str
    group: int
    """Rollouts of one group start from the same example and share a baseline."""
    sample: int
    weight_version: int
    contexts: list[Context] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.COMPLETED
    end: End = End.DONE
    reason: str = ""
    """In words: 'goal', or the message of the error that failed it."""
    reward: float | None = None
    """None until scored; stays None when failed."""
    outcome: float = 0.0
    """The reward without what its turns contributed."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The reward by named part, unweighted."""
    wall_s: float = 0.0
    """The episode's seconds, from its prompt to the end of its environment; of them..."""
    environment_s: float = 0.0
    """...in the steps of its environment: tools, with the wait for a free one..."""
    scoring_s: float = 0.0
    """...and in its rubric: judges."""

    @property
    def num_sampled(self) -> int:
        return sum(sum(context.loss_mask) for context in self.contexts)

    @property
    def used_tool(self) -> bool:
        return any(turn.call is not None and turn.call.ran for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class Batch:
    """One packed micro-batch: flat tensors, no padding between sequences; knows no prompts, tasks or groups.

    Entry t predicts token t + 1: target_T, mask_T, weight_T and every *_T quantity of the loss are already shifted by `pack`.
    Sequences [5 6 7 8] (8 and 7 sampled) and [9 4] (4 sampled) give
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
    cu_seqlens_S1: torch.Tensor
    """int32 offsets; the last equals T."""
    prefix_S: list[int]
    """For each segment the one whose tokens come before it (a prompt that several sequences share), or -1."""
    patch_PC: torch.Tensor
    """On the host: a step's pictures are larger than its weights, and go to the device one micro-batch at a time."""
    grid_I3: torch.Tensor
    """The distinct images of the micro-batch: each is encoded once however many sequences show it."""
    vision_position_V: torch.Tensor
    """Positions in token_T that a vision embedding replaces, in order..."""
    vision_row_V: torch.Tensor
    """...and the row of the encoder's output that goes there."""
    denominator: int
    """This micro-batch's share of the global denominator: shares are summed over micro-batches and data-parallel ranks."""
    advantage_T: torch.Tensor
    engine_logprob_T: torch.Tensor
    old_logprob_T: torch.Tensor | None = None
    reference_logprob_T: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_T.numel()
