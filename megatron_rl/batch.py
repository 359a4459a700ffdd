"""From rollouts to packed micro-batches: the one place where targets are shifted, positions computed and weights written.

Credit is already decided when rollouts arrive here; the batch knows nothing of prompts, tasks or groups.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from megatron_rl.algo.losses import episode_weight
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Batch, Context, Image, Rollout


@dataclass(slots=True, frozen=True)
class Piece:
    """One sequence to be packed, with what its sampled tokens count."""

    context: Context
    advantages: Sequence[float]
    """Of each token of the sequence; those that were not sampled do not count."""
    weight: float
    """Weight of each sampled token..."""
    denominator: int
    """...and this sequence's share of the global denominator: an episode's share goes with its first context."""

    @classmethod
    def uniform(cls, context: Context, *, advantage: float = 0.0, weight: float = 1.0, denominator: int = 1) -> "Piece":
        """With one advantage for all tokens."""
        return cls(context, advantages=[advantage] * len(context.token_ids), weight=weight, denominator=denominator)

    @property
    def num_tokens(self) -> int:
        return len(self.context.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the one that predicts the first sampled token."""
        return self.context.loss_mask.index(1) - 1

    def prompt_key(self, image_token_id: int) -> tuple:
        """Equal for pieces whose prompts are the same tokens and the same images."""
        tokens = tuple(self.context.token_ids[: self.prompt_length])
        placeholders, keys = tokens.count(image_token_id), []
        for image in self.context.images:
            if placeholders == 0:
                break
            keys.append(image.key)
            placeholders -= image.num_tokens
        return tokens, tuple(keys)


def pieces_of(rollout: Rollout, advantages: Sequence[float], *, aggregation: str, fixed_length: int) -> list[Piece]:
    """A rollout's contexts. Each token has its turn's advantage, and a weight that makes the loss the stated mean."""
    weight, denominator = episode_weight(rollout.num_sampled, aggregation=aggregation, fixed_length=fixed_length)
    per_token = [[0.0] * len(context.token_ids) for context in rollout.contexts]
    for turn, advantage in zip(rollout.turns, advantages, strict=True):
        start, stop = turn.span
        per_token[turn.context][start:stop] = [advantage] * (stop - start)
    return [
        Piece(context, advantages=values, weight=weight, denominator=0 if index else denominator)
        for index, (context, values) in enumerate(zip(rollout.contexts, per_token, strict=True))
        if any(context.loss_mask)
    ]


def cut_minibatches(rollouts: list[Rollout], advantages: list[list[float] | None], algo: AlgoSettings) -> list[list[Piece]]:
    """The pieces of each optimizer step: whole groups, in order, as equal in number as can be; rollouts without credit are left out.

    So are those without any advantage where nothing but the advantage moves the policy: they count in the denominator alone. A minibatch
    of nothing else keeps them, so that the engine's logprobs are compared in every step.
    """
    credited = [(rollout, value) for rollout, value in zip(rollouts, advantages, strict=True) if value is not None and rollout.num_sampled]
    places = {group: place for place, group in enumerate(dict.fromkeys(rollout.group for rollout, _ in credited))}
    minibatches: list[list[Piece]] = [[] for _ in range(algo.minibatches)]
    for rollout, value in credited:
        place = places[rollout.group] * algo.minibatches // len(places)
        minibatches[place] += pieces_of(rollout, value, aggregation=algo.aggregation, fixed_length=algo.fixed_length)
    if algo.kl_coef > 0 or algo.entropy_coef > 0:
        return minibatches
    return [_without_idle(pieces) for pieces in minibatches]


def _without_idle(pieces: list[Piece]) -> list[Piece]:
    """Leave out pieces whose advantages are all zero; their share of the denominator goes to the first that stays."""
    moving = [piece for piece in pieces if any(piece.advantages)]
    if not moving:
        return pieces
    spare = sum(piece.denominator for piece in pieces) - sum(piece.denominator for piece in moving)
    return [replace(moving[0], denominator=moving[0].denominator + spare), *moving[1:]]


def mrope_positions(token_ids: list[int], images: Iterable[Image], image_token_id: int) -> torch.Tensor:
    """Rotary positions [3, L] (frame, row, column), as transformers 5.19 Qwen2_5_VLModel.get_rope_index gives them for still images.

    Text counts on by one on all three axes; an image occupies a grid from its start, and text goes on after its longer side.
    Raises ValueError where placeholders and grids do not match.
    """
    grids = [(frames, rows // 2, columns // 2) for frames, rows, columns in (image.grid for image in images)]
    parts, start, used = [], 0, 0
    for is_image, run in groupby(token_ids, key=lambda token: token == image_token_id):
        length = len(list(run))
        if not is_image:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
            continue
        while length > 0:
            if used == len(grids) or grids[used][0] * grids[used][1] * grids[used][2] > length:
                raise ValueError(f"a run of {length} image placeholders does not match the images' grids {grids[used:]}")
            frames, rows, columns = grids[used]
            axes = (torch.arange(frames), torch.arange(rows), torch.arange(columns))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + start)
            start += max(rows, columns)
            length -= frames * rows * columns
            used += 1
    if used != len(grids):
        raise ValueError(f"{len(grids)} images, but placeholders for {used}")
    return torch.cat(parts, 1)


def pack(
    pieces: list[Piece], *, image_token_id: int, multiple_of: int = 1, share_prompts: bool = False, device: torch.device | None = None
) -> Batch:
    """Pack sequences into one micro-batch. Equal images (by key) are stored and encoded once.

    With share_prompts a sequence is cut before the token that predicts its first sampled one, and equal prompts are stored and computed
    once: the rest of each sequence is a segment of its own that also attends to its prompt's segment (prefix_S). Example:
    [5 6 7] and [5 6 8] with 7 and 8 sampled give token_T [5 6 7 6 8], target_T [0 7 0 8 0], cu_seqlens_S1 [0 1 3 5], prefix_S [-1 0 0].

    The length is padded to a multiple of `multiple_of` (tensor parallel size under sequence parallelism) by a segment of zeros without
    weight; no pieces at all give one such segment, the micro-batch of a data-parallel rank without work.
    """
    segments: list[Segment] = []
    prompts: dict[tuple, int] = {}
    for piece in pieces:
        whole = Segment.whole(piece, image_token_id)
        if not share_prompts or piece.prompt_length == 0:
            segments.append(whole)
            continue
        key = piece.prompt_key(image_token_id)
        if key not in prompts:
            prompts[key] = len(segments)
            segments.append(whole.cut(0, piece.prompt_length))
        segments.append(whole.cut(piece.prompt_length, piece.num_tokens, prefix=prompts[key]))
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    padding = -num_tokens % multiple_of if num_tokens else multiple_of
    if padding:
        segments.append(Segment.zeros(padding))
    return _join(segments, denominator=sum(piece.denominator for piece in pieces), device=device)


@dataclass(slots=True, frozen=True)
class Segment:
    """A run of consecutive tokens of one sequence with all that is aligned to it; targets are already shifted."""

    token_ids: list[int]
    targets: list[int]
    mask: list[int]
    engine_logprobs: list[float]
    position_3L: torch.Tensor
    vision: list[tuple[Image, int] | None]
    """For a placeholder, its image and which of the image's tokens it stands for."""
    advantages: Sequence[float]
    weight: float
    prefix: int = -1

    @classmethod
    def whole(cls, piece: Piece, image_token_id: int) -> "Segment":
        context = piece.context
        shown = iter([(image, row) for image in context.images for row in range(image.num_tokens)])
        return cls(
            token_ids=context.token_ids,
            targets=[*context.token_ids[1:], 0],
            mask=[*context.loss_mask[1:], 0],
            engine_logprobs=[*context.engine_logprobs[1:], 0.0],
            position_3L=mrope_positions(context.token_ids, context.images, image_token_id),
            vision=[next(shown) if token == image_token_id else None for token in context.token_ids],
            advantages=[*piece.advantages[1:], 0.0],
            weight=piece.weight,
        )

    @classmethod
    def zeros(cls, length: int) -> "Segment":
        zeros = [0] * length
        return cls(zeros, zeros, zeros, [0.0] * length, torch.zeros(3, length, dtype=torch.long), [None] * length, [0.0] * length, 0.0)

    def cut(self, start: int, stop: int, *, prefix: int = -1) -> "Segment":
        part = slice(start, stop)
        return Segment(
            self.token_ids[part], self.targets[part], self.mask[part], self.engine_logprobs[part], self.position_3L[:, part],
            self.vision[part], self.advantages[part], self.weight, prefix,
        )  # fmt: skip


def _join(segments: list[Segment], *, denominator: int, device: torch.device | None) -> Batch:
    images: dict[str, tuple[int, Image]] = {}
    position_V, row_V, next_row, offsets = [], [], 0, [0]
    for segment in segments:
        for place, shown in enumerate(segment.vision):
            if shown is None:
                continue
            image, row = shown
            if image.key not in images:
                images[image.key] = (next_row, image)
                next_row += image.num_tokens
            position_V.append(offsets[-1] + place)
            row_V.append(images[image.key][0] + row)
        offsets.append(offsets[-1] + len(segment.token_ids))
    pictures = [image for _, image in images.values()]

    def column(values: Callable[[Segment], list], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value for segment in segments for value in values(segment)], dtype=dtype, device=device)

    return Batch(
        token_T=column(lambda s: s.token_ids, torch.long),
        target_T=column(lambda s: s.targets, torch.long),
        mask_T=column(lambda s: s.mask, torch.bool),
        weight_T=column(lambda s: [s.weight * m for m in s.mask], torch.float32),
        position_3T=torch.cat([segment.position_3L for segment in segments], 1).to(device),
        cu_seqlens_S1=torch.tensor(offsets, dtype=torch.int32, device=device),
        prefix_S=[segment.prefix for segment in segments],
        patch_PC=torch.cat([image.patch_PC for image in pictures]) if pictures else torch.empty(0, 0),
        grid_I3=torch.tensor([image.grid for image in pictures], dtype=torch.long, device=device).reshape(-1, 3),
        vision_position_V=torch.tensor(position_V, dtype=torch.long, device=device),
        vision_row_V=torch.tensor(row_V, dtype=torch.long, device=device),
        denominator=denominator,
        advantage_T=column(lambda s: [a * m for a, m in zip(s.advantages, s.mask, strict=True)], torch.float32),
        engine_logprob_T=column(lambda s: s.engine_logprobs, torch.float32),
    )


@dataclass(slots=True, frozen=True)
class Load:
    """A piece and the tokens it adds to a micro-batch (a quarter of its patches among them, as placeholders)."""

    piece: Piece
    first: int
    """As the first of a micro-batch: all its tokens..."""
    next: int
    """...and after the piece before it: without the prompt where that is shared."""


def loads_of(pieces: list[Piece], image_token_id: int, *, share_prompts: bool) -> list[Load]:
    """Order pieces so that equal prompts are neighbors, and their images with them; otherwise in the order given."""
    runs: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        runs.setdefault(piece.prompt_key(image_token_id), []).append(piece)
    loads = []
    for run in runs.values():
        for index, piece in enumerate(run):
            shared = piece.prompt_length if share_prompts and index else 0
            loads.append(Load(piece, first=piece.num_tokens, next=piece.num_tokens - shared))
    return loads


def balance(loads: list[Load], ranks: int) -> list[list[Load]]:
    """Deal a run of neighbors to each data-parallel rank, as near to an equal number of tokens as the borders between pieces allow."""
    total = sum(load.next for load in loads)
    dealt: list[list[Load]] = [[] for _ in range(ranks)]
    done = 0
    for load in loads:
        middle = done + load.next / 2
        dealt[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(load)
        done += load.next
    return dealt


def cut(loads: list[Load], max_tokens: int) -> list[list[Piece]]:
    """Cut one rank's pieces into micro-batches of at most max_tokens (a longer single sequence stands alone); always at least one."""
    micro: list[list[Piece]] = [[]]
    used = 0
    for load in loads:
        size = load.next if micro[-1] else load.first
        if micro[-1] and used + size > max_tokens:
            micro.append([])
            used, size = 0, load.first
        micro[-1].append(load.piece)
        used += size
    return micro
