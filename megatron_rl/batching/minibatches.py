"""Splits sequences into mini-batches, sets loss weights and shards the data across ranks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from megatron_rl.config import BatchSettings
from megatron_rl.types import Rollout, TokenSequence

TokenKey = NDArray[np.int64]
"""Token ids and images of a sequence as one integer array; see `token_key`."""


@dataclass(slots=True, frozen=True)
class PackItem:
    """A sequence to be packed, with the loss weight of its sampled tokens."""

    sequence: TokenSequence
    weight: float = 1.0
    """Loss weight of each sampled token, or of each turn if `weight_is_per_turn` is set."""
    weight_is_per_turn: bool = False
    """True if `weight` is the weight of a turn, divided equally among the turn's sampled tokens."""
    denominator: int = 1
    """Contribution of this sequence to the global denominator of the loss. The contribution of an
    episode is stored at the first packed sequence of the episode.
    """
    origin: tuple[int, int] | None = None
    """(rollout index, sequence index in the rollout); None if the sequence does not belong to a
    rollout.
    """
    teacher: int = 0
    """Index of the sequence's teacher, as in MicroBatch.teacher."""
    is_demonstration: bool = False
    """True for a demonstration among the rollouts of a step, as in MicroBatch."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the sequence."""
        return len(self.sequence.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the token that predicts the first sampled token."""
        return self.sequence.loss_mask.index(1) - 1

    def token_weights(self) -> list[float]:
        """Return the loss weight of each token; 0 where the loss mask is 0."""
        if not self.weight_is_per_turn:
            return [self.weight * sampled for sampled in self.sequence.loss_mask]
        weights = [0.0] * self.num_tokens
        for start, stop in find_turns(self.sequence):
            weights[start:stop] = [self.weight / (stop - start)] * (stop - start)
        return weights


def find_turns(context: TokenSequence) -> list[tuple[int, int]]:
    """Return the [start, stop) range of each turn; a turn consists of adjacent sampled tokens."""
    mask = [0, *context.loss_mask, 0]
    borders = [place for place in range(len(mask) - 1) if mask[place] != mask[place + 1]]
    return list(zip(borders[::2], borders[1::2], strict=True))


def episode_weight(num_sampled: int, settings: BatchSettings) -> tuple[float, int]:
    """Return the loss weight of an episode's tokens and its contribution to the denominator.

    The values depend on batch.loss_agg_mode:

    - token_mean: mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8).
    - turn_mean: mean over the tokens of each turn, then over all turns of the step. The returned
      weight is per turn.
    - sequence_mean: mean over the tokens of each episode, then over all episodes (GRPO, arXiv
      2402.03300, eq. 3).
    - fixed_length: sum over all tokens, divided by (number of episodes * batch.loss_scale_factor)
      (arXiv 2503.20783, preset dr_grpo).

    Args:
        num_sampled: Number of sampled tokens in all sequences of the episode; for turn_mean, the
            number of turns.
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
    raise AssertionError(f"{settings.loss_agg_mode} is not in config.AGGREGATIONS")


def make_pack_items(rollout: Rollout, settings: BatchSettings, *, index: int) -> list[PackItem]:
    """Return a weighted pack item for each sequence of the rollout that contains sampled tokens.

    The weights implement batch.loss_agg_mode (see `episode_weight`). `index` is the index of the
    rollout in the step's list.
    """
    weighted = weigh_sequences(rollout.sequences, settings)
    numbers = (number for number, context in enumerate(rollout.sequences) if any(context.loss_mask))
    return [replace(item, origin=(index, number)) for item, number in zip(weighted, numbers, strict=True)]


def weigh_sequences(sequences: Sequence[TokenSequence], settings: BatchSettings) -> list[PackItem]:
    """Return a weighted pack item for each sequence of an episode that contains sampled tokens."""
    by_turn = settings.loss_agg_mode == "turn_mean"
    num = sum(len(find_turns(context)) if by_turn else sum(context.loss_mask) for context in sequences)
    weight, denominator = episode_weight(num, settings)
    weighted = [
        PackItem(context, weight=weight, weight_is_per_turn=by_turn, denominator=0) for context in sequences if any(context.loss_mask)
    ]
    return [replace(weighted[0], denominator=denominator), *weighted[1:]]


def add_demonstrations(
    minibatches: Sequence[list[PackItem]], demonstrations: Sequence[TokenSequence], settings: BatchSettings
) -> list[list[PackItem]]:
    """Add demonstrations to the mini-batches of rollouts, in order and as evenly as possible.

    A demonstration has the weight and the denominator of an episode with the same tokens. A step
    without mini-batches stays empty.
    """
    joined = [list(each) for each in minibatches]
    for number, sequence in enumerate(demonstrations if joined else ()):
        items = weigh_sequences([sequence], settings)
        joined[number * len(joined) // len(demonstrations)] += [replace(item, is_demonstration=True) for item in items]
    return joined


def add_responses(
    minibatches: Sequence[list[PackItem]], responses: Sequence[TokenSequence], settings: BatchSettings
) -> list[list[PackItem]]:
    """Add responses of a teacher to the mini-batches of rollouts, in order and evenly.

    The loss of a mini-batch becomes that of its rollouts plus the mean over its responses, in which
    a response counts as an episode (batch.loss_agg_mode). They add nothing to the denominator.
    """
    joined = []
    for rollouts, both in zip(minibatches, add_demonstrations(minibatches, responses, settings), strict=True):
        added = both[len(rollouts) :]
        share = sum(each.denominator for each in rollouts) / max(sum(each.denominator for each in added), 1)
        joined.append([*rollouts, *(replace(each, weight=each.weight * share, denominator=0) for each in added)])
    return joined


def cut_minibatches(rollouts: Sequence[Rollout], settings: BatchSettings, *, keep_zero_advantage: bool) -> list[list[PackItem]]:
    """Split a step's training sequences into mini-batches, one per optimizer update.

    A group is never split. Groups are assigned to mini-batches in order and as evenly as possible;
    empty mini-batches are left out. If `keep_zero_advantage` is False, sequences with all-zero
    advantages are dropped but still count towards the denominator. If all sequences of a mini-batch
    have all-zero advantages, all of them are kept. Every step can thus compare engine logprobs with
    trainer logprobs.
    """
    trained = [(index, rollout) for index, rollout in enumerate(rollouts) if rollout.is_trained_on and rollout.num_sampled]
    places = {group: place for place, group in enumerate(dict.fromkeys(rollout.group for _, rollout in trained))}
    minibatches: list[list[PackItem]] = [[] for _ in range(settings.minibatches)]
    for index, rollout in trained:
        place = places[rollout.group] * settings.minibatches // len(places)
        minibatches[place] += make_pack_items(rollout, settings, index=index)
    return [each if keep_zero_advantage else _drop_zero_advantage(each) for each in minibatches if each]


def _drop_zero_advantage(minibatch: list[PackItem]) -> list[PackItem]:
    """Drop sequences with all-zero advantages.

    The denominators of the dropped sequences are added to the first kept sequence. If all sequences
    have all-zero advantages, all sequences are kept.
    """
    moving = [weighted for weighted in minibatch if any(weighted.sequence.advantages)]
    if not moving:
        return minibatch
    spare = sum(weighted.denominator for weighted in minibatch) - sum(weighted.denominator for weighted in moving)
    return [replace(moving[0], denominator=moving[0].denominator + spare), *moving[1:]]


MAX_KV_RATIO = 8
"""Maximum number of attention keys in a micro-batch, as a multiple of batch.micro_batch_tokens. On
a GPU, the keys and values of a segment are stored once more for each segment that continues this
segment (policy/attention.py). The number of keys for a growing multi-turn prefix is thus quadratic
in the number of sequences that share the prefix. Each extra key-value pair takes 1 to 2% of a
layer's memory per token in Qwen2.5-VL, and 2 to 5% in Qwen3-VL. This limit never splits a group of
up to seven rollouts, however long the prompt: G rollouts that share a prompt of P tokens have at
most (G + 1) * P keys for the prompt.
"""


@dataclass(slots=True, frozen=True)
class PackCost:
    """A sequence and the number of tokens that the sequence adds to a micro-batch.

    Image placeholders count as tokens.
    """

    item: PackItem
    num_tokens_alone: int
    """Number of tokens that the sequence adds to an empty micro-batch: the full length of the
    sequence. This is also the number of attention keys of the sequence's last segment, which
    attends to all tokens of the sequence.
    """
    num_added_tokens: int
    """Number of tokens that the sequence adds to a micro-batch when packed directly after its
    predecessor: the length of the sequence minus the length of the shared prefix.
    """

    @property
    def num_shared_tokens(self) -> int:
        """Length of the prefix that the sequence shares with its predecessor."""
        return self.num_tokens_alone - self.num_added_tokens


RankShares = list[list[list[PackItem]]]
"""Sequences for one optimizer update, indexed as [data-parallel rank][micro-batch][sequence]."""


def pack_costs(minibatch: Sequence[PackItem], image_token_id: int, *, share_prompts: bool) -> list[PackCost]:
    """Return the cost of each sequence, sorted so that sequences with a common prefix are adjacent.

    Sequences of one teacher are adjacent, too, because a micro-batch has one teacher, and so are
    demonstrations. If `share_prompts` is False, the cost of a sequence is its full length; the
    order does not change.
    """
    texts = token_key(minibatch, image_token_id)
    order = sorted(prefix_order(texts), key=lambda place: (minibatch[place].is_demonstration, minibatch[place].teacher))
    ordered = [minibatch[place] for place in order]
    shared = shared_lengths(ordered, [texts[place] for place in order]) if share_prompts else [0] * len(ordered)
    return [
        PackCost(each, num_tokens_alone=each.num_tokens, num_added_tokens=each.num_tokens - length)
        for each, length in zip(ordered, shared, strict=True)
    ]


def token_key(weighted: Sequence[PackItem], image_token_id: int) -> list[TokenKey]:
    """Return each sequence's token ids, with a negative image index at every image placeholder.

    If the keys of two sequences have a common prefix, the model's inputs for this prefix are equal,
    including images and rotary positions. If the engine recorded experts, the ids are replaced by
    indices of distinct (id, experts) pairs, so that only tokens with equal experts are shared.
    """
    numbers: dict[str, int] = {}
    texts = []
    for each in weighted:
        text = np.array(each.sequence.token_ids, dtype=np.int64)
        shown = [image.key for image in each.sequence.images for _ in range(image.num_tokens)]
        text[text == image_token_id] = [-1 - numbers.setdefault(key, len(numbers)) for key in shown]
        texts.append(text)
    if not any(each.sequence.routed_experts for each in weighted):
        return texts
    pairs: dict[tuple[int, bytes], int] = {}
    rows = [chain(each.sequence.routed_experts, repeat(b"")) for each in weighted]
    return [
        np.array([pairs.setdefault(pair, len(pairs)) for pair in zip(text.tolist(), row, strict=False)], dtype=np.int64)
        for text, row in zip(texts, rows, strict=True)
    ]


def prefix_order(texts: Sequence[TokenKey]) -> list[int]:
    """Return the indices of the sequences in depth-first order of their prefix tree.

    In this order, a sequence's common prefix with its predecessor is at least as long as its common
    prefix with any earlier sequence.
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
    """Return the length of the prefix that each sequence shares with its predecessor.

    The prefix ends before the token that predicts the first sampled token of the sequence. Example:
    the sequences [1 2 3 4], [1 2 3 5] and [1 2 3 5 6], each with only the last token sampled, yield
    [0, 2, 3].
    """
    neighbors = zip(weighted[1:], pairwise(texts), strict=True)
    return [0] * bool(weighted) + [min(common_prefix(before, after), each.prompt_length) for each, (before, after) in neighbors]


def common_prefix(before: TokenKey, after: TokenKey) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(before), len(after))
    different = before[:length] != after[:length]
    return int(different.argmax()) if different.any() else length


def balance_costs(loads: list[PackCost], ranks: int) -> list[list[PackCost]]:
    """Assign adjacent sequences to each data-parallel rank so that token counts are balanced."""
    total = sum(load.num_added_tokens for load in loads)
    shares: list[list[PackCost]] = [[] for _ in range(ranks)]
    done = 0
    for load in loads:
        middle = done + load.num_added_tokens / 2
        shares[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(load)
        done += load.num_added_tokens
    return shares


def split_by_cost(loads: list[PackCost], max_tokens: int) -> list[list[PackItem]]:
    """Split one rank's sequences into as few micro-batches as possible, of similar sizes.

    A micro-batch has at most max_tokens tokens and MAX_KV_RATIO * max_tokens attention keys; a
    sequence that exceeds a limit by itself is packed alone. The sequences of a micro-batch have the
    same teacher, and all or none of them are demonstrations. If there are no sequences, the result
    is one empty micro-batch.

    The limit is lowered as far as the number of micro-batches allows. Otherwise, the last
    micro-batch could be so small that the host, which launches the same kernels for every
    micro-batch, would be slower than the GPU. Example: 16 sequences of 1,400 tokens with
    max_tokens=8192 are split into 4 + 4 + 4 + 4 sequences and not into 5 + 5 + 5 + 1.
    """
    num = len(_fill_by_cost(loads, max_tokens))
    limit = bisect_left(range(max_tokens), True, key=lambda tokens: len(_fill_by_cost(loads, tokens)) <= num)
    return _fill_by_cost(loads, limit)


def _kind(item: PackItem) -> tuple[int, bool]:
    """Return what the sequences of a micro-batch have in common."""
    return item.teacher, item.is_demonstration


def _fill_by_cost(loads: list[PackCost], max_tokens: int) -> list[list[PackItem]]:
    """Fill one micro-batch after the other up to the limits of `split_by_cost`.

    Keys are counted for each segment that `pack` creates: a segment that ends at position p of a
    sequence has p keys. If a sequence diverges from its predecessor inside a segment, `pack` splits
    this segment in two. Example: [1 2 3 4] has 4 keys. Packing [1 2 5] after [1 2 3 4] splits
    [1 2 3 4] after position 2, which adds 2 keys, and adds a segment with 3 keys. Packing [1 2 6]
    after [1 2 5] only adds a segment with 3 keys.
    """
    micro: list[list[PackItem]] = []
    tokens = keys = 0
    stops: set[int] = set()  # end positions of the previous sequence's segments
    for load in loads:
        kept = {stop for stop in stops if stop <= load.num_shared_tokens}
        added = {load.num_shared_tokens, load.num_tokens_alone} - kept
        is_full = tokens + load.num_added_tokens > max_tokens or keys + sum(added) > MAX_KV_RATIO * max_tokens
        if not micro or is_full or _kind(load.item) != _kind(micro[-1][-1]):
            micro.append([])
            tokens, keys, stops = load.num_tokens_alone, load.num_tokens_alone, {load.num_tokens_alone}
        else:
            tokens, keys, stops = tokens + load.num_added_tokens, keys + sum(added), kept | added
        micro[-1].append(load.item)
    return micro or [[]]
