"""What would make the numbers that differ: each suspect is played through Hugging Face's model, and one that gives them is named.

Of pictures only those are suspected that were shown between the last sampled token which agrees and the first which does not; in bfloat16,
whose bound tells no single token that agrees, all that were shown by then.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from statistics import fmean

import torch
from PIL.Image import Resampling

from megatron_rl.explain.findings import BOUNDS, Bound
from megatron_rl.explain.hf_reference import Reference
from megatron_rl.explain.recorded_step import Looked
from megatron_rl.explain.streamed_weights import Streamed
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource

OTHERS = 24
"""Pictures of the step, beside those of the context, that are tried in one's place."""
FITTED_ROWS = 64
"""Sampled tokens that a temperature is fitted to."""
ENOUGH = 4
"""Sampled tokens that one number, a temperature, does not explain by chance."""
CLEARER = 1.25
"""How many times another's mean gap has to be as large before a suspect behind it is better: of a dozen tokens a wrong one that changes
little was seen below the right one by a fifth, by the rounding of bfloat16 alone."""
Logprobs = Callable[[], torch.Tensor]
"""float64 [R] of the sampled tokens of a context."""
Say = Callable[[torch.Tensor], torch.Tensor]
"""The same of logits [R, V]."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """A context of which somebody says other logprobs than Hugging Face's model."""

    looked: Looked
    said_R: torch.Tensor
    compared_R: torch.Tensor
    """bool: the tokens that are compared; not those of other weights."""
    temperature: float
    bound: Bound

    def gaps(self, logprob_R: torch.Tensor) -> list[float]:
        return (logprob_R - self.said_R).abs()[self.compared_R].tolist()


@dataclass(slots=True, frozen=True, kw_only=True)
class Suspicion:
    """What suspects are made of."""

    reference: Reference
    renderer: Renderer
    gallery: Mapping[str, Image]
    """The pictures of the step, by key."""
    older: TensorSource | None = None
    """Other weights, of which one tensor, or all, may have stayed."""


def explanation(case: Case, suspicion: Suspicion) -> str:
    """The suspect that gives what was said, in words; empty where none does.

    One within float32's bound is it: no other is played. Of those that are only within a wider one the least mean gap counts, and the first
    that has it, to CLEARER; the first of all is that nothing is wrong.
    """
    reference, looked = suspicion.reference, case.looked
    logits_RV = reference.logits(looked)
    held: list[tuple[float, str]] = []
    for name, logprobs in _suspects(case, suspicion, logits_RV):
        gaps = case.gaps(logprobs())
        if BOUNDS["float32"].holds(gaps):
            return name
        if case.bound.holds(gaps):
            held.append((fmean(gaps), name))
    if not held:
        return ""
    least = min(mean for mean, _ in held)
    nothing = fmean(case.gaps(reference.logprobs(looked, logits_RV, temperature=case.temperature)))
    return next(name for mean, name in [(nothing, ""), *held] if mean <= CLEARER * least)


def _suspects(case: Case, suspicion: Suspicion, logits_RV: torch.Tensor) -> Iterator[tuple[str, Logprobs]]:
    reference, looked = suspicion.reference, case.looked
    say = partial(reference.logprobs, looked, temperature=case.temperature)
    if case.compared_R.sum() >= ENOUGH:
        fitted = fitted_temperature(case, reference, logits_RV)
        yield f"temperature {fitted:.4g}, not {case.temperature:g}", lambda: reference.logprobs(looked, logits_RV, temperature=fitted)
    yield "banned ids had a part of the probability", lambda: say(logits_RV, bans=False)
    yield from _of_pictures(case, suspicion, say, logits_RV)
    yield from _of_positions(case, suspicion, say)
    if suspicion.older is not None:
        yield from _of_weights(case, reference, suspicion.older, say)


def fitted_temperature(case: Case, reference: Reference, logits_RV: torch.Tensor) -> float:
    """That which gives what was said with the least mean difference: a grid, then ever smaller parts of it."""
    kept = case.compared_R.nonzero()[:FITTED_ROWS, 0]
    scaled = logits_RV[kept].double().masked_fill(reference.banned, -torch.inf)
    rows = [case.looked.rows[row] for row in kept.tolist()]
    targets = torch.tensor([case.looked.context.token_ids[row + 1] for row in rows], device=scaled.device)

    def gap(log_temperature: float) -> float:
        logprob = (scaled / math.exp(log_temperature)).log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()
        return (logprob - case.said_R[kept]).abs().mean().item()

    best, width = 0.0, 3.0
    while width > 1e-7:
        best = min((best + width * step / 10 for step in range(-10, 11)), key=gap)
        width /= 5
    return float(f"{math.exp(best):.6g}")


def _of_pictures(case: Case, suspicion: Suspicion, say: Say, logits_RV: torch.Tensor) -> Iterator[tuple[str, Logprobs]]:
    reference, looked = suspicion.reference, case.looked
    images = looked.context.images
    for number in suspected_pictures(case, say(logits_RV), reference.spec.image_token_id):
        shown = images[number]
        for other, swapped in _others(number, images, suspicion.gallery):
            name = f"picture {number} ({shown.key[:8]}): {other} was seen in its place"
            yield name, lambda swapped=swapped: say(reference.logits(looked, images=swapped))
        for size in _sizes(shown, suspicion.renderer):
            for which in dict.fromkeys((frozenset([number]), frozenset(range(number, len(images))))):
                again = [_resized(image, size, scale_of=shown) if place in which else image for place, image in enumerate(images)]
                name = f"picture {number} ({shown.key[:8]}){' and those behind it' if len(which) > 1 else ''}: "
                name += f"a second resize, to {size[0]}x{size[1]} and back"
                yield name, lambda again=again: say(reference.logits(looked, images=again))


def suspected_pictures(case: Case, expected_R: torch.Tensor, image_token_id: int) -> list[int]:
    """Those shown between the last token that agrees before the first that does not, and that one; where only their mean does not,
    the last."""
    wrong = [(logprob > case.bound.token).item() for logprob in (expected_R - case.said_R).abs()]
    rows = [(row, is_wrong) for row, is_wrong, counts in zip(case.looked.rows, wrong, case.compared_R.tolist(), strict=True) if counts]
    first = next((row for row, is_wrong in rows if is_wrong), rows[-1][0])
    last_right = max((row for row, _ in rows if row < first and case.bound.is_of_each), default=-1)
    found, place, number = [], 0, 0
    ids = case.looked.context.token_ids
    while place < len(ids) and number < len(case.looked.context.images):
        if ids[place] != image_token_id:
            place += 1
            continue
        place += case.looked.context.images[number].num_tokens
        if last_right < place <= first + 1:
            found.append(number)
        number += 1
    return found


def _others(number: int, images: Sequence[Image], gallery: Mapping[str, Image]) -> Iterator[tuple[str, list[Image]]]:
    """Pictures with as many tokens: those of the context, exchanged, and the step's."""
    shown = images[number]
    for place, other in enumerate(images):
        if other.key != shown.key and other.num_tokens == shown.num_tokens:
            swapped = list(images)
            swapped[place], swapped[number] = shown, other
            yield f"picture {place} ({other.key[:8]}), and this one in that one's,", swapped
    fitting = [other for other in gallery.values() if other.key != shown.key and other.num_tokens == shown.num_tokens and other.pil]
    for other in fitting[:OTHERS]:
        yield f"{other.key[:8]}", [*images[:number], other, *images[number + 1 :]]


def _sizes(image: Image, renderer: Renderer) -> list[tuple[int, int]]:
    """What a picture of its size is made by a second resize: by the run's limits, by the checkpoint's own, to halves."""
    width, height = image.pil.size
    processor = renderer.processor.image_processor
    again = processor(images=[image.pil], do_resize=True, return_tensors="pt")["image_grid_thw"][0].tolist()
    sizes = [renderer.final_size(width, height), (again[2] * renderer.patch, again[1] * renderer.patch), (width // 2, height // 2)]
    return [size for size in dict.fromkeys(sizes) if size != (width, height) and min(size) > 0]


def _resized(image: Image, size: tuple[int, int], *, scale_of: Image) -> Image:
    """Through a size and back; of another picture through one that is as much smaller or larger."""
    (width, height), (own_width, own_height) = scale_of.pil.size, image.pil.size
    there = (max(1, round(size[0] * own_width / width)), max(1, round(size[1] * own_height / height)))
    picture = image.pil.resize(there, Resampling.BICUBIC).resize(image.pil.size, Resampling.BICUBIC)
    return replace(image, pil=picture, patch_PC=None, key=f"{image.key}x{size[0]}x{size[1]}")


def _of_positions(case: Case, suspicion: Suspicion, say: Say) -> Iterator[tuple[str, Logprobs]]:
    reference, looked = suspicion.reference, case.looked
    if not looked.context.images:
        return
    right = reference.spec.rope_sections
    for sections in other_sections(right):

        def rotated(sections: tuple[int, ...] = sections) -> torch.Tensor:
            with reference.sections(sections):
                return say(reference.logits(looked))

        yield f"rope sections {list(sections)}, not {list(right)}", rotated
    known_3L = reference.positions(looked)
    text_3L = torch.arange(known_3L.shape[1]).expand(3, -1)
    others = {"positions of text for pictures, too": text_3L, "positions with rows and columns exchanged": known_3L[[0, 2, 1]]}
    for name, position_3L in others.items():
        yield name, lambda position_3L=position_3L: say(reference.logits(looked, position_3L=position_3L))


def other_sections(sections: Sequence[int]) -> list[tuple[int, ...]]:
    """Exchanged, or with one or all of an axis' pairs given to another."""
    right, found = tuple(sections), list(permutations(sections))
    for giver in range(len(right)):
        for taker in range(len(right)):
            for num in (1, right[giver]):
                moved = list(right)
                moved[giver] -= num
                moved[taker] += num
                found.append(tuple(moved))
    return sorted({each for each in found if each != right and min(each) >= 0})


def _of_weights(case: Case, reference: Reference, older: TensorSource, say: Say) -> Iterator[tuple[str, Logprobs]]:
    moved = moved_tensors(reference.weights, older)

    def with_older(names: Sequence[str]) -> torch.Tensor:
        with reference.weights.holding(names, older):
            return say(reference.logits(case.looked))

    if moved:
        yield "all weights are the older ones", partial(with_older, moved)
    for name in moved:
        yield f"{name} is stale: it is as in the older weights", partial(with_older, [name])


def moved_tensors(weights: Streamed, older: TensorSource) -> list[str]:
    """Those that the older weights have otherwise."""
    return [name for name in weights.names if not _are_equal(older.read(name), weights.tensor(name))]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(other), other)
