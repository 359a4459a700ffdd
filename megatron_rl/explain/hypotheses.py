"""Tests hypotheses about the cause of differing logprobs.

Each hypothesis is simulated with Hugging Face's model.

An image is suspected only if it lies between the last sampled token that agrees and the first
sampled token that differs. In bfloat16, the tolerance cannot prove that a single token agrees, so
all images up to the differing token are suspected.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from statistics import fmean

import torch
from PIL.Image import Resampling

from megatron_rl.explain.findings import TOLERANCES, LogprobTolerance
from megatron_rl.explain.hf_reference import HfReferenceModel
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.streamed_weights import StreamedModel
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource

MAX_OTHER_IMAGES = 24
"""Maximum number of other images from the step to try in place of a suspected image."""
MAX_FITTED_TOKENS = 64
"""Maximum number of sampled tokens to which a temperature is fitted."""
MIN_FITTED_TOKENS = 4
"""Minimum number of sampled tokens for fitting a temperature; with fewer tokens, the temperature
may fit by chance.
"""
MIN_GAP_RATIO = 1.25
"""Maximum mean difference of a candidate, as a multiple of the smallest mean difference.

The first candidate within this limit is selected. With a dozen tokens and bfloat16 rounding, a
wrong hypothesis with little effect had a mean difference that was 20% smaller than that of the
correct hypothesis.
"""
LogprobsFn = Callable[[], torch.Tensor]
"""Function that returns the float64 logprobs [R] of a sequence's sampled tokens."""
LogitsToLogprobs = Callable[[torch.Tensor], torch.Tensor]
"""Function that converts logits [R, V] to the float64 logprobs [R] of the sampled tokens."""


@dataclass(slots=True, frozen=True, kw_only=True)
class MismatchCase:
    """A sequence with logprobs that differ from the logprobs of Hugging Face's model."""

    sequence: RecordedSequence
    observed_R: torch.Tensor
    mask_R: torch.Tensor
    """Bool mask of the compared tokens; tokens sampled with other weights are excluded."""
    temperature: float
    tolerance: LogprobTolerance

    def abs_diffs(self, logprob_R: torch.Tensor) -> list[float]:
        """Return the absolute differences from the observed logprobs for the compared tokens."""
        return (logprob_R - self.observed_R).abs()[self.mask_R].tolist()


@dataclass(slots=True, frozen=True, kw_only=True)
class HypothesisInputs:
    """Data from which hypotheses are built."""

    reference: HfReferenceModel
    renderer: Renderer
    images: Mapping[str, Image]
    """Images of the step, keyed by image key."""
    older_source: TensorSource | None = None
    """Older weights, used to test whether one tensor or all tensors are stale."""


def find_explanation(case: MismatchCase, inputs: HypothesisInputs) -> str:
    """Return the hypothesis that reproduces the observed logprobs, or "" if none does.

    The first hypothesis within the float32 tolerance is returned. If there is none, the hypotheses
    within the wider tolerance of the case are compared by their mean difference from the observed
    logprobs. The first hypothesis whose mean difference is at most MIN_GAP_RATIO times the smallest
    one is returned. The result is "" if the reference without a hypothesis meets this condition.
    """
    reference, looked = inputs.reference, case.sequence
    logits_RV = reference.compute_logits(looked)
    held: list[tuple[float, str]] = []
    for name, logprobs in _hypotheses(case, inputs, logits_RV):
        gaps = case.abs_diffs(logprobs())
        if TOLERANCES["float32"].is_within(gaps):
            return name
        if case.tolerance.is_within(gaps):
            held.append((fmean(gaps), name))
    if not held:
        return ""
    least = min(mean for mean, _ in held)
    nothing = fmean(case.abs_diffs(reference.compute_logprobs(looked, logits_RV, temperature=case.temperature)))
    return next(name for mean, name in [(nothing, ""), *held] if mean <= MIN_GAP_RATIO * least)


def _hypotheses(case: MismatchCase, inputs: HypothesisInputs, logits_RV: torch.Tensor) -> Iterator[tuple[str, LogprobsFn]]:
    reference, looked = inputs.reference, case.sequence
    say = partial(reference.compute_logprobs, looked, temperature=case.temperature)
    if case.mask_R.sum() >= MIN_FITTED_TOKENS:
        fitted = fit_temperature(case, reference, logits_RV)
        yield (
            f"temperature {fitted:.4g}, not {case.temperature:g}",
            lambda: reference.compute_logprobs(looked, logits_RV, temperature=fitted),
        )
    yield "banned ids were not masked", lambda: say(logits_RV, mask_banned=False)
    yield from _image_hypotheses(case, inputs, say, logits_RV)
    yield from _position_hypotheses(case, inputs, say)
    if inputs.older_source is not None:
        yield from _weight_hypotheses(case, reference, inputs.older_source, say)


def fit_temperature(case: MismatchCase, reference: HfReferenceModel, logits_RV: torch.Tensor) -> float:
    """Return the temperature that minimizes the mean difference from the observed logprobs.

    The search uses a grid that is refined around its best point.
    """
    kept = case.mask_R.nonzero()[:MAX_FITTED_TOKENS, 0]
    scaled = logits_RV[kept].double().masked_fill(reference.banned_mask, -torch.inf)
    rows = [case.sequence.sampled_rows[row] for row in kept.tolist()]
    targets = torch.tensor([case.sequence.tokens.token_ids[row + 1] for row in rows], device=scaled.device)

    def gap(log_temperature: float) -> float:
        logprob = (scaled / math.exp(log_temperature)).log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()
        return (logprob - case.observed_R[kept]).abs().mean().item()

    best, width = 0.0, 3.0
    while width > 1e-7:
        best = min((best + width * step / 10 for step in range(-10, 11)), key=gap)
        width /= 5
    return float(f"{math.exp(best):.6g}")


def _image_hypotheses(
    case: MismatchCase, inputs: HypothesisInputs, to_logprobs: LogitsToLogprobs, logits_RV: torch.Tensor
) -> Iterator[tuple[str, LogprobsFn]]:
    reference, looked = inputs.reference, case.sequence
    images = looked.tokens.images
    for number in find_suspect_images(case, to_logprobs(logits_RV), reference.spec.image_token_id):
        shown = images[number]
        for other, swapped in _swapped_images(number, images, inputs.images):
            name = f"image {number} ({shown.key[:8]}): replaced by {other}"
            yield name, lambda swapped=swapped: to_logprobs(reference.compute_logits(looked, images=swapped))
        for size in _resize_candidates(shown, inputs.renderer):
            for which in dict.fromkeys((frozenset([number]), frozenset(range(number, len(images))))):
                again = [_resize_and_back(image, size, scale_of=shown) if place in which else image for place, image in enumerate(images)]
                name = f"image {number} ({shown.key[:8]}){' and all later images' if len(which) > 1 else ''}: "
                name += f"resized again, to {size[0]}x{size[1]} and back"
                yield name, lambda again=again: to_logprobs(reference.compute_logits(looked, images=again))


def find_suspect_images(case: MismatchCase, expected_R: torch.Tensor, image_token_id: int) -> list[int]:
    """Return the indices of the images that may cause the first differing token.

    Suspected images lie between the last agreeing token and the first differing token. If only the
    mean difference exceeds its limit and no single token differs, the last token is used as the
    differing token.
    """
    wrong = [(logprob > case.tolerance.per_token).item() for logprob in (expected_R - case.observed_R).abs()]
    rows = [
        (row, is_wrong) for row, is_wrong, counts in zip(case.sequence.sampled_rows, wrong, case.mask_R.tolist(), strict=True) if counts
    ]
    first = next((row for row, is_wrong in rows if is_wrong), rows[-1][0])
    last_right = max((row for row, _ in rows if row < first and case.tolerance.is_per_token), default=-1)
    found, place, number = [], 0, 0
    ids = case.sequence.tokens.token_ids
    while place < len(ids) and number < len(case.sequence.tokens.images):
        if ids[place] != image_token_id:
            place += 1
            continue
        place += case.sequence.tokens.images[number].num_tokens
        if last_right < place <= first + 1:
            found.append(number)
        number += 1
    return found


def _swapped_images(number: int, images: Sequence[Image], other_images: Mapping[str, Image]) -> Iterator[tuple[str, list[Image]]]:
    """Yield image lists in which another image of equal token count replaces image `number`.

    If the other image is from the same sequence, the two images swap places. If the other image is
    from another sequence of the step, only image `number` is replaced.
    """
    shown = images[number]
    for place, other in enumerate(images):
        if other.key != shown.key and other.num_tokens == shown.num_tokens:
            swapped = list(images)
            swapped[place], swapped[number] = shown, other
            yield f"image {place} ({other.key[:8]}), and vice versa", swapped
    fitting = [other for other in other_images.values() if other.key != shown.key and other.num_tokens == shown.num_tokens and other.pil]
    for other in fitting[:MAX_OTHER_IMAGES]:
        yield f"image {other.key[:8]}", [*images[:number], other, *images[number + 1 :]]


def _resize_candidates(image: Image, renderer: Renderer) -> list[tuple[int, int]]:
    """Return the sizes that a second resize of an image may produce.

    The candidates are the size within the run's pixel limits, the size within the checkpoint's own
    pixel limits, and half of the image's size.
    """
    picture = image.pil
    assert picture is not None, "a replayed sequence has its images"
    width, height = picture.size
    processor = renderer.processor.image_processor
    again = processor(images=[picture], do_resize=True, return_tensors="pt")["image_grid_thw"][0].tolist()
    sizes = [
        renderer.final_size(width, height),
        (again[2] * renderer.patch_size, again[1] * renderer.patch_size),
        (width // 2, height // 2),
    ]
    return [size for size in dict.fromkeys(sizes) if size != (width, height) and min(size) > 0]


def _resize_and_back(image: Image, size: tuple[int, int], *, scale_of: Image) -> Image:
    """Resize an image to another size, and then back to its original size.

    The horizontal and vertical scale factors are the factors that resize `scale_of` to `size`.
    """
    own = image.pil
    assert own is not None and scale_of.pil is not None, "a replayed sequence has its images"
    (width, height), (own_width, own_height) = scale_of.pil.size, own.size
    there = (max(1, round(size[0] * own_width / width)), max(1, round(size[1] * own_height / height)))
    picture = own.resize(there, Resampling.BICUBIC).resize(own.size, Resampling.BICUBIC)
    return replace(image, pil=picture, patch_PC=None, key=f"{image.key}x{size[0]}x{size[1]}")


def _position_hypotheses(case: MismatchCase, inputs: HypothesisInputs, to_logprobs: LogitsToLogprobs) -> Iterator[tuple[str, LogprobsFn]]:
    reference, looked = inputs.reference, case.sequence
    if not looked.tokens.images:
        return
    right = reference.spec.rope_sections
    for sections in alternative_rope_sections(right):

        def rotated(sections: tuple[int, ...] = sections) -> torch.Tensor:
            with reference.override_rope_sections(sections):
                return to_logprobs(reference.compute_logits(looked))

        yield f"rope sections {list(sections)}, not {list(right)}", rotated
    known_3L = reference.compute_positions(looked)
    text_3L = torch.arange(known_3L.shape[1]).expand(3, -1)
    others = {"text positions used for images": text_3L, "positions with rows and columns swapped": known_3L[[0, 2, 1]]}
    for name, position_3L in others.items():
        yield name, lambda position_3L=position_3L: to_logprobs(reference.compute_logits(looked, position_3L=position_3L))


def alternative_rope_sections(sections: Sequence[int]) -> list[tuple[int, ...]]:
    """Return plausible incorrect values of the model's mrope sections.

    Incorrect sections are permutations of the correct sections, and sections in which some
    dimensions are moved from one axis to another.
    """
    right, found = tuple(sections), list(permutations(sections))
    for giver in range(len(right)):
        for taker in range(len(right)):
            for num in (1, right[giver]):
                moved = list(right)
                moved[giver] -= num
                moved[taker] += num
                found.append(tuple(moved))
    return sorted({each for each in found if each != right and min(each) >= 0})


def _weight_hypotheses(
    case: MismatchCase, reference: HfReferenceModel, older_source: TensorSource, to_logprobs: LogitsToLogprobs
) -> Iterator[tuple[str, LogprobsFn]]:
    moved = find_changed_tensors(reference.weights, older_source)

    def with_older(names: Sequence[str]) -> torch.Tensor:
        with reference.weights.override_tensors(names, older_source):
            return to_logprobs(reference.compute_logits(case.sequence))

    if moved:
        yield "all weights equal the older weights", partial(with_older, moved)
    for name in moved:
        yield f"{name} is stale: it equals the older weights", partial(with_older, [name])


def find_changed_tensors(weights: StreamedModel, older_source: TensorSource) -> list[str]:
    """Return the names of the tensors that differ from the older weights."""
    return [name for name in weights.names if not _equal_in_dtype(older_source.read(name), weights.get_tensor(name))]


def _equal_in_dtype(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(other), other)
