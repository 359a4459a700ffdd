"""Micro-batches of a recipe's full size: real sequences, packed by the real packer."""

from dataclasses import fields, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.batching.minibatches import MAX_KV_RATIO, PackItem, pack_costs, split_by_cost
from megatron_rl.batching.packing import pack
from megatron_rl.config import Settings
from megatron_rl.memory_plan.engine_memory import max_image_tokens
from megatron_rl.memory_plan.gpu_memory import most_image_tokens
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.types import Image, MicroBatch, TokenSequence

TEXT_ID = 11
NUM_SHARING = MAX_KV_RATIO
"""Number of responses that share a prompt. With seven eighths of the tokens in the prompt,
attention gathers almost MAX_KV_RATIO keys per token."""
ON_HOST = ("grid_I3",)


def shared_prompts(model: ModelSpec, settings: Settings) -> list[TokenSequence]:
    """Return sequences of batch.micro_batch_tokens tokens in all, most of them of images.

    Eight short responses share each prompt, which consists of images: as many gathered keys as a
    micro-batch can have. Responses contain an image too, unless their tokens are needed for a chunk
    of logits.
    """
    num_tokens, largest = settings.batch.micro_batch_tokens, max_image_tokens(model, settings)
    longest = min(most_image_tokens(model, settings), 63 * settings.engine.max_model_len // 64)
    num_prompts = -(-7 * num_tokens // (8 * longest))
    width = num_tokens // num_prompts
    response = width // (8 * NUM_SHARING) + 2
    sampled = min(response, settings.parallel.log_probs_chunk_size // (num_prompts * NUM_SHARING) + 1)
    sequences = []
    for prompt in range(num_prompts):
        for number in range(NUM_SHARING):
            sequence = TokenSequence()
            _extend_with_images(sequence, model, width - NUM_SHARING * (response + 1), largest=largest, name=f"{prompt}")
            sequence.extend([TEXT_ID] * sampled, logprobs=[0.0] * sampled)
            _extend_with_images(sequence, model, response - sampled, largest=largest, name=f"{prompt}/{number}")
            sequences.append(sequence)
    return sequences


def longest_sequence(model: ModelSpec, settings: Settings) -> list[TokenSequence]:
    """Return one sequence of engine.max_model_len tokens, with as many image tokens as possible."""
    sequence, num_images = TokenSequence(), min(most_image_tokens(model, settings), 7 * settings.engine.max_model_len // 8)
    _extend_with_images(sequence, model, num_images, largest=max_image_tokens(model, settings), name="long")
    rest = settings.engine.max_model_len - len(sequence.token_ids)
    sequence.extend([TEXT_ID] * rest, logprobs=[0.0] * rest)
    return [sequence]


def _extend_with_images(sequence: TokenSequence, model: ModelSpec, num_tokens: int, *, largest: int, name: str) -> None:
    """Append images, each with a token before and after it, until there are `num_tokens` tokens."""
    merge, stop, number = model.vision.spatial_merge_size, len(sequence.token_ids) + num_tokens, 0
    while stop - len(sequence.token_ids) > 2:
        size = min(largest, stop - len(sequence.token_ids) - 2)
        rows = max(rows for rows in range(1, int(size**0.5) + 1))
        columns = size // rows
        image = Image(None, None, (1, merge * rows, merge * columns), key=f"{name}/{number}", merge=merge)
        sequence.extend([model.vision_start_id, *[model.image_token_id] * image.num_tokens, TEXT_ID], images=(image,))
        number += 1
    sequence.extend([TEXT_ID] * (stop - len(sequence.token_ids)))


def pack_one(sequences: list[TokenSequence], model: ModelSpec, settings: Settings) -> MicroBatch:
    """Pack the sequences into one micro-batch on the host. Fails if they need more than one."""
    items = [PackItem(sequence) for sequence in sequences]
    costs = pack_costs(items, model.image_token_id, share_prompts=True)
    (ordered,) = split_by_cost(costs, settings.batch.micro_batch_tokens)
    multiple = settings.parallel.tp if settings.parallel.sequence_parallel else 1
    return pack(
        ordered, image_token_id=model.image_token_id, positions=model.rope_positions, multiple_of=multiple, share_prompts=True
    )  # fmt: skip


def on_fake_device(batch: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    """Return the micro-batch with FakeTensors on "cuda" as its tensors, except the grids."""
    moved = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, torch.Tensor) and each.name not in ON_HOST:
            with mode:
                moved[each.name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return replace(batch, **moved)
