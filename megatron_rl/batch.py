"""From rollouts to packed micro-batches: the one place where targets are shifted, positions computed and weights written.

Credit is already decided when rollouts arrive here; the batch knows nothing of prompts, tasks or groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron_rl.algo.losses import episode_weight
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Batch, Image, Rollout, Sequence


@dataclass(slots=True, frozen=True)
class Piece:
    """One sequence to be packed, with what its sampled tokens count."""

    sequence: Sequence
    advantage: float
    weight: float
    """Weight of each sampled token..."""
    denominator: int
    """...and this sequence's share of the global denominator: an episode's share goes with its first sequence."""

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.token_ids)

    @property
    def cost(self) -> int:
        """Tokens plus a quarter of the patches: a patch passes through the smaller of the two towers."""
        return self.num_tokens + sum(image.num_tokens for image in self.sequence.images)


def pieces_of(rollout: Rollout, advantage: float, *, aggregation: str, fixed_length: int) -> list[Piece]:
    """A rollout's sequences, each token weighted so that the loss is the stated mean over episodes or tokens."""
    weight, denominator = episode_weight(rollout.num_sampled, aggregation=aggregation, fixed_length=fixed_length)
    return [
        Piece(sequence, advantage=advantage, weight=weight, denominator=0 if index else denominator)
        for index, sequence in enumerate(rollout.sequences)
    ]


def cut_minibatches(rollouts: list[Rollout], advantages: list[float | None], algo: AlgoSettings) -> list[list[Piece]]:
    """The pieces of each optimizer step: whole groups, in order; rollouts without credit are left out."""
    minibatches: list[list[Piece]] = [[] for _ in range(algo.minibatches)]
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        if advantage is not None and rollout.num_sampled:
            place = rollout.group * algo.minibatches // algo.prompts_per_step
            minibatches[place] += pieces_of(rollout, advantage, aggregation=algo.aggregation, fixed_length=algo.fixed_length)
    return minibatches


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


def pack(pieces: list[Piece], *, image_token_id: int, multiple_of: int = 1, device: torch.device | None = None) -> Batch:
    """Pack sequences into one micro-batch. Equal images (by key) are stored and encoded once.

    The length is padded to a multiple of `multiple_of` (tensor parallel size under sequence parallelism) by a sequence of zeros without
    weight; no pieces at all give one such sequence, the micro-batch of a data-parallel rank without work.
    """
    tokens: list[int] = []
    columns: dict[str, list] = {"target": [], "mask": [], "weight": [], "advantage": [], "engine": []}
    positions, offsets = [], [0]
    images: dict[str, tuple[int, Image]] = {}
    vision_position: list[int] = []
    vision_row: list[int] = []
    next_row = 0
    for piece in pieces:
        sequence, start = piece.sequence, len(tokens)
        placeholders = [start + place for place, token in enumerate(sequence.token_ids) if token == image_token_id]
        for image in sequence.images:
            if image.key not in images:
                images[image.key] = (next_row, image)
                next_row += image.num_tokens
            row = images[image.key][0]
            vision_row.extend(range(row, row + image.num_tokens))
        vision_position.extend(placeholders)
        positions.append(mrope_positions(sequence.token_ids, sequence.images, image_token_id))
        tokens.extend(sequence.token_ids)
        offsets.append(len(tokens))
        mask = [*sequence.loss_mask[1:], 0]
        columns["target"] += [*sequence.token_ids[1:], 0]
        columns["mask"] += mask
        columns["weight"] += [piece.weight * m for m in mask]
        columns["advantage"] += [piece.advantage * m for m in mask]
        columns["engine"] += [*sequence.engine_logprobs[1:], 0.0]
    padding = -len(tokens) % multiple_of if tokens else multiple_of
    if padding:
        tokens.extend([0] * padding)
        offsets.append(len(tokens))
        positions.append(torch.zeros(3, padding, dtype=torch.long))
        for column in columns.values():
            column.extend([0] * padding)
    pictures = [image for _, image in images.values()]
    return Batch(
        token_T=torch.tensor(tokens, device=device),
        target_T=torch.tensor(columns["target"], device=device),
        mask_T=torch.tensor(columns["mask"], dtype=torch.bool, device=device),
        weight_T=torch.tensor(columns["weight"], dtype=torch.float32, device=device),
        position_3T=torch.cat(positions, 1).to(device),
        cu_seqlens_S1=torch.tensor(offsets, dtype=torch.int32, device=device),
        patch_PC=(torch.cat([image.patch_PC for image in pictures]) if pictures else torch.empty(0, 0)).to(device),
        grid_I3=torch.tensor([image.grid for image in pictures], dtype=torch.long, device=device).reshape(-1, 3),
        vision_position_V=torch.tensor(vision_position, dtype=torch.long, device=device),
        vision_row_V=torch.tensor(vision_row, dtype=torch.long, device=device),
        denominator=sum(piece.denominator for piece in pieces),
        advantage_T=torch.tensor(columns["advantage"], dtype=torch.float32, device=device),
        engine_logprob_T=torch.tensor(columns["engine"], dtype=torch.float32, device=device),
    )


def balance(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    """Deal pieces to data-parallel ranks so that costs are even; neighbors stay together, because a group's members share images.

    Each rank receives a run of pieces whose cost is as near to the mean as the borders between pieces allow.
    """
    total = sum(piece.cost for piece in pieces)
    dealt: list[list[Piece]] = [[] for _ in range(ranks)]
    done = 0
    for piece in pieces:
        middle = done + piece.cost / 2
        dealt[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(piece)
        done += piece.cost
    return dealt


def cut(pieces: list[Piece], max_tokens: int) -> list[list[Piece]]:
    """Cut one rank's pieces into micro-batches of at most max_tokens (a longer single sequence stands alone); always at least one."""
    micro: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        if micro[-1] and used + piece.num_tokens > max_tokens:
            micro.append([])
            used = 0
        micro[-1].append(piece)
        used += piece.num_tokens
    return micro
