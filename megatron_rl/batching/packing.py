"""Packs sequences into micro-batches and maps per-token results back to sequences.

No other module shifts targets by one token. Advantages are per token (TokenSequence.advantages), so
a micro-batch does not depend on prompts, tasks or algorithms. MicroBatch.origin_S is used to map
per-token model outputs back to sequences.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile

import torch

from megatron_rl.batching.minibatches import PackItem, shared_lengths, token_key
from megatron_rl.types import TOKEN_COLUMNS, Image, LossInputs, MicroBatch, Rollout, SegmentSource, TokenSequence, ValueLossInputs

PositionsFn = Callable[[Sequence[int], Sequence[Image]], torch.Tensor]
"""(token_ids, images) -> rotary positions [3, L] of a sequence. Example: ModelSpec.rope_positions.
"""


def pack(
    weighted: Sequence[PackItem], *, image_token_id: int, positions: PositionsFn, multiple_of: int = 1,
    share_prompts: bool = False, device: torch.device | None = None,
) -> MicroBatch:  # fmt: skip
    """Pack sequences into one micro-batch; images with equal keys are stored and encoded once.

    With `share_prompts`, the prefix that a sequence shares with its predecessor is stored and
    computed once. The prefix ends before the token that predicts the first sampled token. The rest
    of the sequence is a separate segment that continues the prefix's segment (prefix_S) and attends
    to that segment and its ancestors in the tree. Example: the sequences [5 6 7], [5 6 8]
    and [5 6 8 3 4], each with only the last token sampled, are packed as follows:

        token_T        [5 6 7 6 8 3 4]
        target_T       [6 7 0 8 0 4 0]
        sequence_T     [0 0 0 1 1 2 2]
        cu_seqlens_S1  [0 1 3 5 7]
        prefix_S       [-1 0 0 2]

    All sequences must have the same teacher, and all or none are demonstrations. Zero-weight
    padding extends the micro-batch to a multiple of `multiple_of` tokens. With sequence
    parallelism, `multiple_of` is the tensor-parallel size. If `weighted` is empty, the micro-batch
    contains only padding, for a data-parallel rank without work.
    """
    shared = shared_lengths(weighted, token_key(weighted, image_token_id)) if share_prompts else [0] * len(weighted)
    segments: list[Segment] = []
    path: list[tuple[int, int]] = []  # (end position, segment index) of the previous sequence's segments
    for number, each in enumerate(weighted):
        whole = Segment.from_item(each, image_token_id, positions, number=number)
        while path and path[-1][0] > shared[number]:
            path.pop()
        for start, stop in pairwise(split_points(shared[number:], each.num_tokens)):
            segments.append(whole.cut(start, stop, prefix=path[-1][1] if path else -1))
            path.append((stop, len(segments) - 1))
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    padding = -num_tokens % multiple_of if num_tokens else multiple_of
    if padding:
        segments.append(Segment.make_padding(padding, number=len(weighted)))
    ((teacher, is_demonstration),) = {(each.teacher, each.is_demonstration) for each in weighted} or {(0, False)}
    joined = _join(segments, denominator=sum(each.denominator for each in weighted), teacher=teacher, device=device)
    return replace(joined, is_demonstration=is_demonstration)


def split_points(shared: Sequence[int], length: int) -> list[int]:
    """Return the positions at which a sequence is split into segments.

    A sequence is split where it diverges from its predecessor, and where later sequences diverge
    from this sequence. The last position is the end of the sequence.

    Example: `shared` [2, 7, 9, 4, 2, 8] and `length` 10 yield [2, 4, 7, 10]. The entries 9 and 8
    add no split position, because in both cases the predecessor had already diverged from this
    sequence (at positions 7 and 2).

    Args:
        shared: Result of `shared_lengths`, starting at this sequence.
        length: Number of tokens in this sequence.
    """
    own, *later = shared
    return sorted({own, *takewhile(lambda lowest: lowest > own, accumulate(later, min)), length})


def distinct_images(contexts: Iterable[TokenSequence]) -> list[Image]:
    """Return the distinct images of these sequences, in the same order as MicroBatch.images."""
    return list({image.key: image for context in contexts for image in context.images}.values())


def empty_batch(length: int, *, device: torch.device | None = None) -> MicroBatch:
    """Return a micro-batch of zero-weight padding, for a rank without work."""
    batch = _join([Segment.make_padding(length, number=0)], denominator=0, teacher=0, device=device)
    return replace(batch, old_value_T=torch.zeros_like(batch.weight_T), return_T=torch.zeros_like(batch.weight_T))


@dataclass(slots=True, frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence, with shifted targets and all other per-token columns."""

    token_ids: list[int]
    targets: list[int]
    mask: list[int]
    rollout_logprobs: list[float]
    advantages: list[float]
    position_3L: torch.Tensor
    image_rows: list[tuple[Image, int] | None]
    """(image, index of the vision token in the image) at image placeholders; None elsewhere."""
    weights: list[float]
    number: int
    """Zero-based index of the segment's sequence in the micro-batch."""
    is_padding: bool = False
    prefix: int = -1
    """Index of the segment that this segment continues, or -1 if this segment starts a sequence."""
    origin: SegmentSource | None = None
    """Source of the segment in the rollouts; None for padding and for sequences without a rollout.
    """

    @classmethod
    def from_item(cls, weighted: PackItem, image_token_id: int, positions: PositionsFn, *, number: int) -> "Segment":
        """Return the whole sequence as one segment with shifted targets."""
        context, origin = weighted.sequence, weighted.origin
        shown = iter([(image, row) for image in context.images for row in range(image.num_tokens)])
        return cls(
            token_ids=context.token_ids,
            targets=[*context.token_ids[1:], 0],
            mask=[*context.loss_mask[1:], 0],
            rollout_logprobs=[*context.rollout_logprobs[1:], 0.0],
            advantages=[*context.advantages[1:], 0.0] if context.advantages else [0.0] * len(context.token_ids),
            position_3L=positions(context.token_ids, context.images),
            image_rows=[next(shown) if token == image_token_id else None for token in context.token_ids],
            weights=[*weighted.token_weights()[1:], 0.0],
            number=number,
            origin=None if origin is None else SegmentSource(*origin, start=0),
        )

    @classmethod
    def make_padding(cls, length: int, *, number: int) -> "Segment":
        """Return a segment of zero-weight padding."""
        zeros, nothing = [0] * length, [0.0] * length
        return cls(
            token_ids=zeros, targets=zeros, mask=zeros, rollout_logprobs=nothing, advantages=nothing,
            position_3L=torch.zeros(3, length, dtype=torch.long), image_rows=[None] * length, weights=nothing, number=number,
            is_padding=True,
        )  # fmt: skip

    def cut(self, start: int, stop: int, *, prefix: int = -1) -> "Segment":
        """Return tokens [start, stop) as a segment that continues segment `prefix`."""
        part = slice(start, stop)
        return Segment(
            token_ids=self.token_ids[part], targets=self.targets[part], mask=self.mask[part],
            rollout_logprobs=self.rollout_logprobs[part], advantages=self.advantages[part],
            position_3L=self.position_3L[:, part], image_rows=self.image_rows[part], weights=self.weights[part], number=self.number,
            prefix=prefix,
            origin=None if self.origin is None else replace(self.origin, start=start),
        )  # fmt: skip


def _join(segments: list[Segment], *, denominator: int, teacher: int, device: torch.device | None) -> MicroBatch:
    images: dict[str, tuple[int, Image]] = {}
    position_M, row_M, next_row, offsets = [], [], 0, [0]
    for segment in segments:
        for place, shown in enumerate(segment.image_rows):
            if shown is None:
                continue
            image, row = shown
            if image.key not in images:
                images[image.key] = (next_row, image)
                next_row += image.num_tokens
            position_M.append(offsets[-1] + place)
            row_M.append(images[image.key][0] + row)
        offsets.append(offsets[-1] + len(segment.token_ids))
    shown = [image for _, image in images.values()]

    def column(values: Callable[[Segment], list], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value for segment in segments for value in values(segment)], dtype=dtype, device=device)

    mask = [sampled for segment in segments for sampled in segment.mask]
    return MicroBatch(
        token_T=column(lambda s: s.token_ids, torch.long),
        target_T=column(lambda s: s.targets, torch.long),
        mask_T=torch.tensor(mask, dtype=torch.bool, device=device),
        row_R=torch.tensor([row for row, sampled in enumerate(mask) if sampled], dtype=torch.long, device=device),
        weight_T=column(lambda s: s.weights, torch.float32),
        position_3T=torch.cat([segment.position_3L for segment in segments], 1).to(device),
        sequence_T=column(lambda s: [s.number] * len(s.token_ids), torch.long),
        cu_seqlens_S1=torch.tensor(offsets, dtype=torch.int32, device=device),
        offset_S1=offsets,
        prefix_S=[segment.prefix for segment in segments],
        origin_S=[segment.origin for segment in segments],
        num_sequences_S=_count_sequences(segments),
        images=shown,
        grid_I3=torch.tensor([image.grid for image in shown], dtype=torch.long).reshape(-1, 3),
        vision_position_M=torch.tensor(position_M, dtype=torch.long, device=device),
        vision_row_M=torch.tensor(row_M, dtype=torch.long, device=device),
        denominator=denominator,
        teacher=teacher,
        advantage_T=column(lambda s: [a * m for a, m in zip(s.advantages, s.mask, strict=True)], torch.float32),
        rollout_logprob_T=column(lambda s: s.rollout_logprobs, torch.float32),
    )


def _count_sequences(segments: Sequence[Segment]) -> list[int]:
    """Return the number of sequences that contain each segment; 0 for padding."""
    last = {segment.number: index for index, segment in enumerate(segments) if not segment.is_padding}
    counts = [0] * len(segments)
    for index in last.values():  # from the end of a sequence to its start
        while index >= 0:
            counts[index] += 1
            index = segments[index].prefix
    return counts


def make_loss_inputs(
    batch: MicroBatch, rows_R: torch.Tensor, logprob_R: torch.Tensor, entropy_R: torch.Tensor, *,
    divergence: Sequence[torch.Tensor] = (), values: ValueLossInputs | None = None,
) -> LossInputs:  # fmt: skip
    """Return the loss inputs for a micro-batch.

    `rows_R` contains the indices of the entries with a sampled target, and `divergence` the columns
    of a comparison with a teacher (TeacherComparison), or nothing. If the micro-batch has no
    old logprobs, the detached current logprobs are used instead. If it has no teacher, although
    others have one, the policy takes the teacher's place, so that the terms of the loss are 0.
    """
    reference_T, old_T, coefficient_T, current_T = batch.ref_logprob_T, batch.old_logprob_T, batch.logprob_scale_T, batch.on_policy_T
    teacher_T = batch.teacher_logprob_T
    of_teacher_R = logprob_R.detach() if batch.teacher < 0 else None if teacher_T is None else teacher_T[rows_R]
    return LossInputs(
        logprob_R=logprob_R,
        entropy_R=entropy_R,
        old_logprob_R=logprob_R.detach() if old_T is None else old_T[rows_R],
        rollout_logprob_R=batch.rollout_logprob_T[rows_R],
        ref_logprob_R=None if reference_T is None else reference_T[rows_R],
        advantage_R=batch.advantage_T[rows_R],
        weight_R=batch.weight_T[rows_R],
        sequence_R=batch.sequence_T[rows_R],
        turn_R=turn_ids(rows_R),
        teacher_logprob_R=of_teacher_R,
        divergence_R=divergence[0] if divergence else None,
        clipped_R=divergence[1] if divergence else None,
        logprob_scale_R=None if coefficient_T is None else coefficient_T[rows_R],
        on_policy_R=None if current_T is None else current_T[rows_R],
        values=values,
        is_demonstration=batch.is_demonstration,
    )


def turn_ids(rows_R: torch.Tensor) -> torch.Tensor:
    """Return the zero-based turn index of each row.

    The row indices of one turn are consecutive. Between two turns, at least one index is missing
    from `rows_R`: the index of an observed token, or of a sequence's last entry, which has no
    target.
    """
    return (rows_R.diff(prepend=rows_R.new_full((1,), -2)) != 1).cumsum(0) - 1


TokenColumns = dict[tuple[int, int], list[float]]
"""Maps (rollout index, sequence index) to one number per token of the sequence."""


def scatter_to_rollouts(rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], numbers: Sequence[torch.Tensor]) -> TokenColumns:
    """Map per-entry model outputs of micro-batches ([T] each) to per-token columns of sequences.

    A column is 0.0 where the loss mask is 0. The output at entry t refers to token t + 1, so the
    output at the last entry of a sequence is unused.
    """
    columns: TokenColumns = {}
    for batch, number_T in zip(batches, numbers, strict=True):
        values, borders = number_T.tolist(), batch.offset_S1
        for origin, first, last in zip(batch.origin_S, borders[:-1], borders[1:], strict=True):
            if origin is None:
                continue
            context = rollouts[origin.rollout].sequences[origin.sequence]
            column = columns.setdefault((origin.rollout, origin.sequence), [0.0] * len(context.token_ids))
            for place, value in enumerate(values[first:last], origin.start + 1):
                if place < len(column) and context.loss_mask[place]:
                    column[place] = value
    return columns


def gather_teacher_top(rollouts: Sequence[Rollout], batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return TokenSequence.teacher_top of a micro-batch's rows as ids and logprobs, [R, K] each."""
    ids, logprobs = [], []
    for origin, (first, last) in zip(batch.origin_S, pairwise(batch.offset_S1), strict=True):
        if origin is None:
            continue
        sequence = rollouts[origin.rollout].sequences[origin.sequence]
        start, top = origin.start + 1, sequence.teacher_top
        assert top is not None, "the server's tokens are missing"
        before, num = sum(sequence.loss_mask[:start]), sum(sequence.loss_mask[start : start + last - first])
        rows = slice(before * top.top_k, (before + num) * top.top_k)
        ids.append(torch.tensor(top.token_ids[rows], dtype=torch.long).view(num, top.top_k))
        logprobs.append(torch.tensor(top.logprobs[rows], dtype=torch.float32).view(num, top.top_k))
    return torch.cat(ids), torch.cat(logprobs)


def gather_column(rollouts: Sequence[Rollout], batch: MicroBatch, column: str) -> torch.Tensor:
    """Return a per-token column of the rollouts, aligned to a micro-batch's targets, as [T].

    The result is 0 where the target was not sampled. `column` is one of TOKEN_COLUMNS or
    weight_versions. Use this function for columns that are computed after packing.
    """
    assert column in (*TOKEN_COLUMNS, "weight_versions"), column
    borders = batch.offset_S1
    numbers = [0.0] * batch.num_tokens
    for origin, first, last in zip(batch.origin_S, borders[:-1], borders[1:], strict=True):
        if origin is not None:
            about = slice(origin.start + 1, origin.start + 1 + last - first)
            known = getattr(rollouts[origin.rollout].sequences[origin.sequence], column)[about]
            numbers[first : first + len(known)] = known
    return torch.tensor(numbers, dtype=torch.float32, device=batch.mask_T.device) * batch.mask_T
