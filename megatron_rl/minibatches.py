"""Which contexts an optimizer update trains on, what their tokens count, and which rank computes them in which micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config import BatchSettings
from megatron_rl.types import Context, Rollout


@dataclass(slots=True, frozen=True)
class WeightedContext:
    """A context to be packed, with what its sampled tokens count."""

    context: Context
    weight: float = 1.0
    """What each sampled token counts, or each turn."""
    by_turn: bool = False
    """The weight is a turn's: its sampled tokens share it."""
    denominator: int = 1
    """This context's share of the global denominator: an episode's share goes with its first context that is packed."""
    origin: tuple[int, int] | None = None
    """Which of the packed rollouts it is of, and which context of that; None outside of a rollout."""

    @property
    def num_tokens(self) -> int:
        return len(self.context.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the one that predicts the first sampled token."""
        return self.context.loss_mask.index(1) - 1

    def token_weights(self) -> list[float]:
        """What each token counts; 0 where the mask is 0."""
        if not self.by_turn:
            return [self.weight * sampled for sampled in self.context.loss_mask]
        weights = [0.0] * self.num_tokens
        for start, stop in turns_in(self.context):
            weights[start:stop] = [self.weight / (stop - start)] * (stop - start)
        return weights

    def prompt_key(self, image_token_id: int) -> tuple:
        """Equal for contexts whose prompts are the same tokens and the same images."""
        tokens = tuple(self.context.token_ids[: self.prompt_length])
        placeholders, keys = tokens.count(image_token_id), []
        for image in self.context.images:
            if placeholders == 0:
                break
            keys.append(image.key)
            placeholders -= image.num_tokens
        return tokens, tuple(keys)


def turns_in(context: Context) -> list[tuple[int, int]]:
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
    match settings.aggregation:
        case "token_mean" | "turn_mean":
            return 1.0, num_sampled
        case "sequence_mean":
            return 1.0 / num_sampled, 1
        case "fixed_length":
            return 1.0, settings.fixed_length
    raise AssertionError(f"{settings.aggregation} is none of config.AGGREGATIONS")


def weighted_contexts(rollout: Rollout, settings: BatchSettings, *, index: int) -> list[WeightedContext]:
    """The contexts of rollout number `index` that have sampled tokens, weighted so that the loss is the stated mean."""
    by_turn = settings.aggregation == "turn_mean"
    num = sum(len(turns_in(context)) for context in rollout.contexts) if by_turn else rollout.num_sampled
    weight, denominator = episode_weight(num, settings)
    weighted = [
        WeightedContext(context, weight=weight, by_turn=by_turn, denominator=0, origin=(index, number))
        for number, context in enumerate(rollout.contexts)
        if any(context.loss_mask)
    ]
    return [replace(weighted[0], denominator=denominator), *weighted[1:]]


def cut_minibatches(rollouts: Sequence[Rollout], settings: BatchSettings, *, with_idle: bool) -> list[list[WeightedContext]]:
    """The contexts of each optimizer update: whole groups, in order, as equal in number as can be; none where nothing is trained on.

    Without `with_idle` those without any advantage are left out: they count in the denominator alone. A minibatch of nothing else keeps
    them, so that the engine's logprobs are compared in every step.
    """
    trained = [(index, rollout) for index, rollout in enumerate(rollouts) if rollout.is_trained_on and rollout.num_sampled]
    places = {group: place for place, group in enumerate(dict.fromkeys(rollout.group for _, rollout in trained))}
    minibatches: list[list[WeightedContext]] = [[] for _ in range(settings.minibatches)]
    for index, rollout in trained:
        place = places[rollout.group] * settings.minibatches // len(places)
        minibatches[place] += weighted_contexts(rollout, settings, index=index)
    return [each if with_idle else _without_idle(each) for each in minibatches if each]


def _without_idle(minibatch: list[WeightedContext]) -> list[WeightedContext]:
    """Leave out contexts whose advantages are all zero; their share of the denominator goes to the first that stays."""
    moving = [weighted for weighted in minibatch if any(weighted.context.advantages)]
    if not moving:
        return minibatch
    spare = sum(weighted.denominator for weighted in minibatch) - sum(weighted.denominator for weighted in moving)
    return [replace(moving[0], denominator=moving[0].denominator + spare), *moving[1:]]


@dataclass(slots=True, frozen=True)
class Load:
    """A context and the tokens it adds to a micro-batch (those of its images among them, as placeholders)."""

    weighted: WeightedContext
    first: int
    """Tokens it adds as the first of a micro-batch: all."""
    next: int
    """Tokens it adds after the context before it: without the prompt where that is shared."""


def loads_of(minibatch: Sequence[WeightedContext], image_token_id: int, *, share_prompts: bool) -> list[Load]:
    """Order contexts so that equal prompts are neighbors, and their images with them; otherwise in the order given."""
    runs: dict[tuple, list[WeightedContext]] = {}
    for weighted in minibatch:
        runs.setdefault(weighted.prompt_key(image_token_id), []).append(weighted)
    loads = []
    for run in runs.values():
        for index, weighted in enumerate(run):
            shared = weighted.prompt_length if share_prompts and index else 0
            loads.append(Load(weighted, first=weighted.num_tokens, next=weighted.num_tokens - shared))
    return loads


def balance(loads: list[Load], ranks: int) -> list[list[Load]]:
    """Deal a run of neighbors to each data-parallel rank, as near to an equal number of tokens as the borders between contexts allow."""
    total = sum(load.next for load in loads)
    dealt: list[list[Load]] = [[] for _ in range(ranks)]
    done = 0
    for load in loads:
        middle = done + load.next / 2
        dealt[min(ranks - 1, int(middle * ranks / max(total, 1)))].append(load)
        done += load.next
    return dealt


def cut(loads: list[Load], max_tokens: int) -> list[list[WeightedContext]]:
    """Cut one rank's contexts into micro-batches of at most max_tokens (a longer single context stands alone); always at least one."""
    micro: list[list[WeightedContext]] = [[]]
    used = 0
    for load in loads:
        size = load.next if micro[-1] else load.first
        if micro[-1] and used + size > max_tokens:
            micro.append([])
            used, size = 0, load.first
        micro[-1].append(load.weighted)
        used += size
    return micro
