"""Which contexts an optimizer update trains on, what their tokens count, and which rank computes them in which micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_rl.config import BatchSettings
from megatron_rl.types import Rollout, TokenSequence

TokenKey = NDArray[np.int64]
"""The tokens and images of a sequence, as `token_key` encodes them."""


@dataclass(slots=True, frozen=True)
class PackItem:
    """A context to be packed, with what its sampled tokens count."""

    sequence: TokenSequence
    weight: float = 1.0
    """What each sampled token counts, or each turn."""
    weight_is_per_turn: bool = False
    """The weight is a turn's: its sampled tokens share it."""
    denominator: int = 1
    """This context's share of the global denominator: an episode's share goes with its first context that is packed."""
    origin: tuple[int, int] | None = None
    """Which of the packed rollouts it is of, and which context of that; None outside of a rollout."""

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the one that predicts the first sampled token."""
        return self.sequence.loss_mask.index(1) - 1

    def token_weights(self) -> list[float]:
        """What each token counts; 0 where the mask is 0."""
        if not self.weight_is_per_turn:
            return [self.weight * sampled for sampled in self.sequence.loss_mask]
        weights = [0.0] * self.num_tokens
        for start, stop in find_turns(self.sequence):
            weights[start:stop] = [self.weight / (stop - start)] * (stop - start)
        return weights


def find_turns(context: TokenSequence) -> list[tuple[int, int]]:
    """First and one-past-last token of each run of sampled tokens."""
    mask = [0, *context.loss_mask, 0]
    borders = [place for place in range(len(mask) - 1) if mask[place] != mask[place + 1]]
    return list(zip(borders[::2], borders[1::2], strict=True))


def episode_weight(num_sampled: int, settings: BatchSettings) -> tuple[float, int]:
    """The weight of each sampled token of an episode, and the episode's share of the integer the loss sum is divided by.

    token_mean: the mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8). turn_mean: that over all turns of each one's token
    mean; here the weight is a turn's, and num_sampled counts turns. sequence_mean: the mean over episodes of each one's token mean (GRPO,
    arXiv 2402.03300, eq. 3). fixed_length: the sum over tokens divided by episodes * fixed_length (Dr. GRPO, arXiv 2503.20783).
    num_sampled counts all turns of the episode, over all its contexts.
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
    """The contexts of rollout number `index` that have sampled tokens, weighted so that the loss is the stated mean."""
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
    """The contexts of each optimizer update: whole groups, in order, as equal in number as can be; none where nothing is trained on.

    Without `keep_zero_advantage` those without any advantage are left out: they count in the denominator alone. A minibatch of nothing
    else keeps them, so that the engine's logprobs are compared in every step.
    """
    trained = [(index, rollout) for index, rollout in enumerate(rollouts) if rollout.is_trained_on and rollout.num_sampled]
    places = {group: place for place, group in enumerate(dict.fromkeys(rollout.group for _, rollout in trained))}
    minibatches: list[list[PackItem]] = [[] for _ in range(settings.minibatches)]
    for index, rollout in trained:
        place = places[rollout.group] * settings.minibatches // len(places)
        minibatches[place] += make_pack_items(rollout, settings, index=index)
    return [each if keep_zero_advantage else _drop_zero_advantage(each) for each in minibatches if each]


def _drop_zero_advantage(minibatch: list[PackItem]) -> list[PackItem]:
    """Leave out contexts whose advantages are all zero; their share of the denominator goes to the first that stays."""
    moving = [weighted for weighted in minibatch if any(weighted.sequence.advantages)]
    if not moving:
        return minibatch
    spare = sum(weighted.denominator for weighted in minibatch) - sum(weighted.denominator for weighted in moving)
    return [replace(moving[0], denominator=moving[0].denominator + spare), *moving[1:]]


MAX_KV_RATIO = 8
"""Keys of a micro-batch at most, for each of batch.micro_batch_tokens. Attention on a GPU keeps the keys and values of a segment again for
each segment that continues it (policy/attention.py), so contexts that grow turn by turn have the square of their number. In Qwen2.5-VL one
more key and value is 1 to 2% of what a layer keeps of a token, in Qwen3-VL 2 to 5%. And no group of seven is cut by it, however long its
prompt is: G members behind a prompt of P tokens have at most (G + 1) * P keys beside their own."""


@dataclass(slots=True, frozen=True)
class PackCost:
    """A context and the tokens it adds to a micro-batch (those of its images among them, as placeholders)."""

    item: PackItem
    num_tokens_alone: int
    """Tokens it adds as the first of a micro-batch: all. So many keys its last segment has anywhere: its own and all before."""
    num_added_tokens: int
    """Tokens it adds after the context before it: without those that the two share."""

    @property
    def num_shared_tokens(self) -> int:
        return self.num_tokens_alone - self.num_added_tokens


RankShares = list[list[list[PackItem]]]
"""An update's contexts: the micro-batches of each data-parallel rank."""


def pack_costs(minibatch: Sequence[PackItem], image_token_id: int, *, share_prompts: bool) -> list[PackCost]:
    """Order contexts so that what begins alike is together, and its images with it; otherwise in the order given."""
    texts = token_key(minibatch, image_token_id)
    order = prefix_order(texts)
    ordered = [minibatch[place] for place in order]
    shared = shared_lengths(ordered, [texts[place] for place in order]) if share_prompts else [0] * len(ordered)
    return [
        PackCost(each, num_tokens_alone=each.num_tokens, num_added_tokens=each.num_tokens - length)
        for each, length in zip(ordered, shared, strict=True)
    ]


def token_key(weighted: Sequence[PackItem], image_token_id: int) -> list[TokenKey]:
    """The tokens of each context, and in a placeholder's place a number below 0 that is its image's own: what begins alike is alike to a
    model, positions included."""
    numbers: dict[str, int] = {}
    texts = []
    for each in weighted:
        text = np.array(each.sequence.token_ids, dtype=np.int64)
        shown = [image.key for image in each.sequence.images for _ in range(image.num_tokens)]
        text[text == image_token_id] = [-1 - numbers.setdefault(key, len(numbers)) for key in shown]
        texts.append(text)
    return texts


def prefix_order(texts: Sequence[TokenKey]) -> list[int]:
    """The order in which a walk through the tree of their beginnings meets them, branches in the order given: none has a longer beginning
    in common with any before it than with the one just before it."""
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
    """For each context the tokens that it and the one before it begin with, as far as none of them predicts a token that it sampled.
    Example: [1 2 3 4], [1 2 3 5] and [1 2 3 5 6], each with its last token sampled, give [0, 2, 4]."""
    neighbors = zip(weighted[1:], pairwise(texts), strict=True)
    return [0] * bool(weighted) + [min(common_prefix(before, after), each.prompt_length) for each, (before, after) in neighbors]


def common_prefix(before: TokenKey, after: TokenKey) -> int:
    """How many numbers both begin with."""
    length = min(len(before), len(after))
    different = before[:length] != after[:length]
    return int(different.argmax()) if different.any() else length


def balance_costs(loads: list[PackCost], ranks: int) -> list[list[PackCost]]:
    """Deal a run of neighbors to each data-parallel rank, as near to an equal number of tokens as the borders between contexts allow."""
    total = sum(load.num_added_tokens for load in loads)
    dealt: list[list[PackCost]] = [[] for _ in range(ranks)]
    done = 0
    for load in loads:
        middle = done + load.num_added_tokens / 2
        dealt[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(load)
        done += load.num_added_tokens
    return dealt


def split_by_cost(loads: list[PackCost], max_tokens: int) -> list[list[PackItem]]:
    """Cut one rank's contexts into micro-batches of at most max_tokens and MAX_KV_RATIO * max_tokens keys (a longer single context stands
    alone); always at least one.

    Keys are those of the segments that `pack` makes: one that stops at place p of its context has p. A context parts from the one before it
    within a segment, which becomes two, or at the end of one. Example: after [1 2 3 4], of 4 keys, [1 2 5] adds 2 + 3 and [1 2 6] then 3.
    """
    micro: list[list[PackItem]] = []
    tokens = keys = 0
    stops: set[int] = set()  # of the segments of the context before
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
