"""Selects the sequences of each optimizer update, weights them and shards them across ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_rl.config import BatchSettings
from megatron_rl.types import Rollout, TokenSequence

TokenKey = NDArray[np.int64]
"""Tokens and images of a sequence, as `token_key` encodes them."""


@dataclass(slots=True, frozen=True)
class PackItem:
    """A sequence to be packed, with the weight of its sampled tokens in the loss."""

    sequence: TokenSequence
    weight: float = 1.0
    """Weight of each sampled token, or of each turn if `weight_is_per_turn`."""
    weight_is_per_turn: bool = False
    """True if the weight belongs to a turn and its sampled tokens share it equally."""
    denominator: int = 1
    """Share of this sequence in the global denominator. An episode's share goes with its first
    packed sequence.
    """
    origin: tuple[int, int] | None = None
    """Index of the packed rollout and index of the sequence in it; None if the sequence belongs to
    no rollout.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.sequence.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the one that predicts the first sampled token."""
        return self.sequence.loss_mask.index(1) - 1

    def token_weights(self) -> list[float]:
        """Return the weight of each token; 0 where the mask is 0."""
        if not self.weight_is_per_turn:
            return [self.weight * sampled for sampled in self.sequence.loss_mask]
        weights = [0.0] * self.num_tokens
        for start, stop in find_turns(self.sequence):
            weights[start:stop] = [self.weight / (stop - start)] * (stop - start)
        return weights


def find_turns(context: TokenSequence) -> list[tuple[int, int]]:
    """Return the start and stop positions of each run of sampled tokens."""
    mask = [0, *context.loss_mask, 0]
    borders = [place for place in range(len(mask) - 1) if mask[place] != mask[place + 1]]
    return list(zip(borders[::2], borders[1::2], strict=True))


def episode_weight(num_sampled: int, settings: BatchSettings) -> tuple[float, int]:
    """Return the weight of an episode's sampled tokens, and its share of the global denominator.

    Aggregations (batch.loss_agg_mode):

    - token_mean: mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8).
    - turn_mean: mean over all turns of each turn's token mean. The weight is then that of a turn.
    - sequence_mean: mean over episodes of each episode's token mean (GRPO, arXiv 2402.03300, eq.
      3).
    - fixed_length: sum over tokens divided by episodes * batch.loss_scale_factor (Dr. GRPO, arXiv
      2503.20783).

    Args:
        num_sampled: Number of sampled tokens of the episode over all its sequences; of turns for
            turn_mean.
        settings: Batch settings.
    """
    assert num_sampled >= 1, "an episode without sampled tokens has no loss and must not be packed"
    match settings.loss_agg_mode:
        case "token_mean" | "turn_mean":
            return 1.0, num_sampled
        case "sequence_mean":
            return 1.0 / num_sampled, 1
        case "fixed_length":
            return 1.0, settings.loss_scale_factor
    raise AssertionError(f"{settings.loss_agg_mode} is none of config.AGGREGATIONS")


def make_pack_items(rollout: Rollout, settings: BatchSettings, *, index: int) -> list[PackItem]:
    """Return the weighted sequences of rollout number `index` that have sampled tokens.

    The weights make the loss the mean that batch.loss_agg_mode names.
    """
    by_turn = settings.loss_agg_mode == "turn_mean"
    num = sum(len(find_turns(context)) for context in rollout.sequences) if by_turn else rollout.num_sampled
    weight, denominator = episode_weight(num, settings)
    weighted = [
        PackItem(context, weight=weight, weight_is_per_turn=by_turn, denominator=0, origin=(index, number))
        for number, context in enumerate(rollout.sequences)
        if any(context.loss_mask)
    ]
    return [replace(weighted[0], denominator=denominator), *weighted[1:]]


def cut_minibatches(rollouts: Sequence[Rollout], settings: BatchSettings, *, keep_zero_advantage: bool) -> list[list[PackItem]]:
    """Return the sequences of each optimizer update.

    Whole groups are assigned in order, as evenly as possible. Empty mini-batches are left out.
    Without `keep_zero_advantage`, sequences without any advantage are dropped and count in the
    denominator only. A mini-batch of nothing but such sequences keeps them, so that the engine's
    logprobs are compared with the trainer's in every step.
    """
    trained = [(index, rollout) for index, rollout in enumerate(rollouts) if rollout.is_trained_on and rollout.num_sampled]
    places = {group: place for place, group in enumerate(dict.fromkeys(rollout.group for _, rollout in trained))}
    minibatches: list[list[PackItem]] = [[] for _ in range(settings.minibatches)]
    for index, rollout in trained:
        place = places[rollout.group] * settings.minibatches // len(places)
        minibatches[place] += make_pack_items(rollout, settings, index=index)
    return [each if keep_zero_advantage else _drop_zero_advantage(each) for each in minibatches if each]


def _drop_zero_advantage(minibatch: list[PackItem]) -> list[PackItem]:
    """Drop sequences with only zero advantages and add their denominator to the first one kept."""
    moving = [weighted for weighted in minibatch if any(weighted.sequence.advantages)]
    if not moving:
        return minibatch
    spare = sum(weighted.denominator for weighted in minibatch) - sum(weighted.denominator for weighted in moving)
    return [replace(moving[0], denominator=moving[0].denominator + spare), *moving[1:]]


MAX_KV_RATIO = 8
"""Limit on the attention keys of a micro-batch, per token of batch.micro_batch_tokens. Attention on
a GPU stores the keys and values of a segment again for each segment that continues it
(policy/attention.py), so the keys of a growing multi-turn prefix are quadratic in the number of its
sequences. In Qwen2.5-VL one more key and value is 1 to 2% of what a layer stores per token, in
Qwen3-VL 2 to 5%. No group of seven is split by this limit, however long its prompt is: G members
with a prompt of P tokens have at most (G + 1) * P keys besides their own.
"""


@dataclass(slots=True, frozen=True)
class PackCost:
    """A sequence and the number of tokens it adds to a micro-batch, image placeholders included."""

    item: PackItem
    num_tokens_alone: int
    """Number of tokens that the sequence adds as the first of a micro-batch: all of its tokens.
    This is also the number of keys of its last segment in any micro-batch, because that segment
    attends to all tokens of the sequence.
    """
    num_added_tokens: int
    """Number of tokens that the sequence adds after its predecessor, minus their shared prefix."""

    @property
    def num_shared_tokens(self) -> int:
        """Number of tokens in the prefix that the sequence shares with its predecessor."""
        return self.num_tokens_alone - self.num_added_tokens


RankShares = list[list[list[PackItem]]]
"""Sequences of one optimizer update: a list of micro-batches for each data-parallel rank."""


def pack_costs(minibatch: Sequence[PackItem], image_token_id: int, *, share_prompts: bool) -> list[PackCost]:
    """Return packing costs, ordered so that sequences with a common prefix are neighbors.

    Without `share_prompts` the cost of each sequence is its full length; the order is the same.
    """
    texts = token_key(minibatch, image_token_id)
    order = prefix_order(texts)
    ordered = [minibatch[place] for place in order]
    shared = shared_lengths(ordered, [texts[place] for place in order]) if share_prompts else [0] * len(ordered)
    return [
        PackCost(each, num_tokens_alone=each.num_tokens, num_added_tokens=each.num_tokens - length)
        for each, length in zip(ordered, shared, strict=True)
    ]


def token_key(weighted: Sequence[PackItem], image_token_id: int) -> list[TokenKey]:
    """Return the token ids of each sequence, with a negative number per image at its placeholders.

    Two sequences with equal keys up to a position are equal inputs to a model up to there,
    positions included.
    """
    numbers: dict[str, int] = {}
    texts = []
    for each in weighted:
        text = np.array(each.sequence.token_ids, dtype=np.int64)
        shown = [image.key for image in each.sequence.images for _ in range(image.num_tokens)]
        text[text == image_token_id] = [-1 - numbers.setdefault(key, len(numbers)) for key in shown]
        texts.append(text)
    return texts


def prefix_order(texts: Sequence[TokenKey]) -> list[int]:
    """Return the order of a depth-first walk through the prefix tree, branches in the given order.

    No sequence then has a longer common prefix with any earlier one than with its predecessor.
    """
    order: list[int] = []
    todo = [(list(range(len(texts))), 0)]
    while todo:
        places, depth = todo.pop()
        depth += min((common_prefix(texts[places[0]][depth:], texts[place][depth:]) for place in places), default=0)
        branches: dict[bytes, list[int]] = {}
        for place in places:
            branches.setdefault(texts[place][depth : depth + 1].tobytes(), []).append(place)
        order += branches.pop(b"", [])
        todo += [(branch, depth) for branch in reversed(branches.values())]
    return order


def shared_lengths(weighted: Sequence[PackItem], texts: Sequence[TokenKey]) -> list[int]:
    """Return for each sequence the length of the prefix that it shares with its predecessor.

    The prefix ends before the token that predicts the sequence's first sampled token. Example: [1 2
    3 4], [1 2 3 5] and [1 2 3 5 6], each with its last token sampled, give [0, 2, 3].
    """
    neighbors = zip(weighted[1:], pairwise(texts), strict=True)
    return [0] * bool(weighted) + [min(common_prefix(before, after), each.prompt_length) for each, (before, after) in neighbors]


def common_prefix(before: TokenKey, after: TokenKey) -> int:
    """Return the length of the common prefix."""
    length = min(len(before), len(after))
    different = before[:length] != after[:length]
    return int(different.argmax()) if different.any() else length


def balance_costs(loads: list[PackCost], ranks: int) -> list[list[PackCost]]:
    """Assign neighboring sequences to each data-parallel rank, with nearly equal token counts."""
    total = sum(load.num_added_tokens for load in loads)
    dealt: list[list[PackCost]] = [[] for _ in range(ranks)]
    done = 0
    for load in loads:
        middle = done + load.num_added_tokens / 2
        dealt[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(load)
        done += load.num_added_tokens
    return dealt


def split_by_cost(loads: list[PackCost], max_tokens: int) -> list[list[PackItem]]:
    """Split one rank's sequences into micro-batches, always at least one.

    A micro-batch has at most max_tokens tokens and MAX_KV_RATIO * max_tokens keys; a longer single
    sequence is a micro-batch of its own. Keys are counted per segment that `pack` makes: a segment
    that ends at position p of its sequence has p keys. A sequence diverges from its predecessor
    within a segment, which becomes two, or at the end of one. Example: after [1 2 3 4] with 4 keys,
    [1 2 5] adds 2 + 3 keys, and [1 2 6] then adds 3.
    """
    micro: list[list[PackItem]] = []
    tokens = keys = 0
    stops: set[int] = set()  # end positions of the previous sequence's segments
    for load in loads:
        kept = {stop for stop in stops if stop <= load.num_shared_tokens}
        added = {load.num_shared_tokens, load.num_tokens_alone} - kept
        if not micro or tokens + load.num_added_tokens > max_tokens or keys + sum(added) > MAX_KV_RATIO * max_tokens:
            micro.append([])
            tokens, keys, stops = load.num_tokens_alone, load.num_tokens_alone, {load.num_tokens_alone}
        else:
            tokens, keys, stops = tokens + load.num_added_tokens, keys + sum(added), kept | added
        micro[-1].append(load.item)
    return micro or [[]]
