"""Checks of a recorded step that need no model; each check returns a findings.CheckResult."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import torch
from PIL.Image import Image as Picture

from megatron_rl.explain.findings import CheckResult
from megatron_rl.explain.recorded_step import RecordedSequence, RecordedStep
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.rollout.renderer import Renderer, image_key
from megatron_rl.types import Image, Rollout

PATCH_TOLERANCE = 1e-5
"""Maximum difference between two computations of the same patches.

Normalized pixel values are of the order of 1, so this tolerance covers rounding.
"""


def run_sequence_checks(
    step: RecordedStep, renderer: Renderer, spec: ModelSpec, *, step_number: int, max_staleness: int
) -> list[CheckResult]:
    """Run all checks and return their results.

    The newest weight version that can have sampled the step's tokens is `step_number`.
    """
    keys = {image.key: image for rollout in step.rollouts.values() for image in rollout.images}
    return [
        check_masks(step),
        check_placeholders(step, spec),
        check_banned_ids(step, renderer),
        check_versions(step, step_number=step_number, max_staleness=max_staleness),
        check_images(keys, renderer),
        check_patches(keys, renderer),
    ]


def check_masks(step: RecordedStep) -> CheckResult:
    """Check that masks, turn spans, versions and logprobs agree on which tokens were sampled."""
    result = CheckResult("masks, spans, logprobs")
    for each in step.sequences:
        result.num_checked += 1
        context, spans = each.tokens, _sampled_positions(step.rollouts[each.rollout_index], each.index)
        sampled = [bool(mask) for mask in context.loss_mask]
        numbers = zip(context.rollout_logprobs, context.weight_versions, strict=True)
        for what, said in (
            ("the spans of the turns", [place in spans for place in range(len(sampled))]),
            ("weight_versions", [version >= 0 for version in context.weight_versions]),
            ("logprobs", [mask if -1e4 < logprob <= 1e-6 else not mask for mask, (logprob, _) in zip(sampled, numbers, strict=True)]),
        ):
            wrong = next((place for place, pair in enumerate(zip(sampled, said, strict=True)) if pair[0] != pair[1]), None)
            if wrong is not None:
                is_sampled = "sampled" if sampled[wrong] else "observed"
                result.problems.append(f"{each} token {wrong}: {is_sampled} according to the mask, but not according to {what}")
        silent = next((place for place, mask in enumerate(sampled) if not mask and context.rollout_logprobs[place] != 0.0), None)
        if silent is not None:
            result.problems.append(f"{each} token {silent}: was observed, but has a logprob of {context.rollout_logprobs[silent]:.4g}")
    return result


def _sampled_positions(rollout: Rollout, number: int) -> set[int]:
    return {place for turn in rollout.turns if turn.sequence == number for place in range(*turn.token_span)}


def check_placeholders(step: RecordedStep, spec: ModelSpec) -> CheckResult:
    """Check that image placeholders match the image grids in number and arrangement.

    If they do not match, rotary positions cannot be computed.
    """
    result = CheckResult("placeholders and grids")
    for each in step.sequences:
        result.num_checked += 1
        for number, image in enumerate(each.tokens.images):
            if image.merge != spec.vision.spatial_merge_size or image.grid[0] != 1:
                result.problems.append(
                    f"{each} image {number}: grid {list(image.grid)} with merge size {image.merge} does not fit the model"
                )
        num = sum(token == spec.image_token_id for token in each.tokens.token_ids)
        asked = sum(image.num_tokens for image in each.tokens.images)
        if num != asked:
            result.problems.append(f"{each}: {num} placeholders, but its image grids require {asked}")
            continue
        try:
            spec.rope_positions(each.tokens.token_ids, each.tokens.images)
        except ValueError as error:
            result.problems.append(f"{each}: {error}")
    return result


def check_banned_ids(step: RecordedStep, renderer: Renderer) -> CheckResult:
    """Check that no banned token was sampled."""
    result, never = CheckResult("banned ids"), set(renderer.banned_ids)
    for each in step.sequences:
        result.num_checked += 1
        pairs = enumerate(zip(each.tokens.token_ids, each.tokens.loss_mask, strict=True))
        for place in [place for place, (token, sampled) in pairs if sampled and token in never][:1]:
            token = each.tokens.token_ids[place]
            result.problems.append(f"{each} token {place}: banned id {token} was sampled")
    return result


def check_versions(step: RecordedStep, *, step_number: int, max_staleness: int) -> CheckResult:
    """Check the weight versions of sampled tokens.

    Versions must not decrease within a sequence, exceed the step's version, or be older than
    `max_staleness` allows.
    """
    result = CheckResult("weight versions")
    for each in step.sequences:
        result.num_checked += 1
        known = [(place, version) for place, version in enumerate(each.tokens.weight_versions) if version >= 0]
        if not known:  # check_masks reports missing versions of sampled tokens
            continue
        for (_, before), (place, now) in pairwise(known):
            if now < before:
                result.problems.append(f"{each} token {place}: has version {now}, after tokens of version {before}")
                break
        place, newest = max(known, key=lambda pair: pair[1])
        if newest > step_number:
            result.problems.append(f"{each} token {place}: has version {newest}, but step {step_number} has weights up to {step_number}")
        place, oldest = min(known, key=lambda pair: pair[1])
        if oldest < step_number - max_staleness:
            result.problems.append(f"{each} token {place}: has version {oldest}, older than run.max_staleness={max_staleness} allows")
    return result


def check_images(images: Mapping[str, Image], renderer: Renderer) -> CheckResult:
    """Check that each image's pixels match its key and that its size matches its grid."""
    result = CheckResult("image pixels", unit="pictures")
    for key, image in images.items():
        if image.pil is None:
            continue
        result.num_checked += 1
        size = tuple(patches * renderer.patch_size for patches in (image.grid[2], image.grid[1]))
        found = image_key(image.pil)
        if image.pil.size != size:
            told = f"was resized again: it has {_format_size(image.pil.size)} pixels, its grid requires {_format_size(size)}"
            result.problems.append(f"image {key[:8]}: {told}")
        elif found != key:
            other = f"image {found[:8]}: the images were swapped" if found in images else "others"
            result.problems.append(f"image {key[:8]}: its pixels belong to {other}")
    return result


def check_patches(images: Mapping[str, Image], renderer: Renderer) -> CheckResult:
    """Check that the renderer and `compute_patches` compute the same patches from an image."""
    result = CheckResult("recomputed patches", unit="pictures")
    for key, image in images.items():
        picture = image.pil
        if picture is None or picture.size != (image.grid[2] * renderer.patch_size, image.grid[1] * renderer.patch_size):
            continue
        result.num_checked += 1
        made, expected = renderer.patches(image, lambda _, picture=picture: picture), compute_patches(picture, renderer)
        if made.shape != expected.shape:
            result.problems.append(f"image {key[:8]}: {list(made.shape)} patches, its pixels require {list(expected.shape)}")
            continue
        gap, row = (made - expected).abs().amax(1).max(0)
        if gap > PATCH_TOLERANCE:
            result.problems.append(f"image {key[:8]}: patch {int(row)} differs by {gap:.3g}; the image was modified (resized again?)")
    return result


def compute_patches(picture: Picture, renderer: Renderer) -> torch.Tensor:
    """Compute the patches of an image, float32 [P, C], without calling the image processor.

    Pixels are scaled, normalized and cut into squares in merge order; the image is repeated to fill
    a temporal patch.
    """
    processor, patch, merge = renderer.processor.image_processor, renderer.patch_size, renderer.merge_size
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64) / 255.0
    pixels = (pixels - np.array(processor.image_mean)) / np.array(processor.image_std)
    rows, columns = (side // patch // merge for side in pixels.shape[:2])
    squares = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(squares[:, :, :, :, :, None], processor.temporal_patch_size, axis=5)
    return torch.tensor(frames.reshape(rows * columns * merge**2, -1), dtype=torch.float32)


ImageToPatches = Callable[[Image], torch.Tensor]
"""Function that returns the patches of an image, float32 [P, C]."""


def make_patch_fn(renderer: Renderer) -> ImageToPatches:
    """Return a function that computes patches from recorded pixels without the renderer's cache."""

    def made(image: Image) -> torch.Tensor:
        return renderer.processor.image_processor(images=[image.pil], do_resize=False, return_tensors="pt")["pixel_values"]

    return made


def split_replayable(step: RecordedStep, spec: ModelSpec) -> tuple[list[RecordedSequence], list[str]]:
    """Return the sequences that the model can process, and a message for each other sequence."""
    good, lines = [], []
    for each in step.sequences:
        context = each.tokens
        fits = all(image.pil is not None and image.pil.size == _expected_size(image, spec) for image in context.images)
        num = sum(token == spec.image_token_id for token in context.token_ids)
        inside = max(context.token_ids) < spec.vocab_size and not context.loss_mask[0]
        if fits and inside and num == sum(image.num_tokens for image in context.images):
            good.append(each)
        else:
            lines.append(f"{each}: not replayed: its images, placeholders or ids do not fit the model")
    return good, lines


def _expected_size(image: Image, spec: ModelSpec) -> tuple[int, int]:
    return image.grid[2] * spec.vision.patch_size, image.grid[1] * spec.vision.patch_size


def _format_size(size: tuple[int, ...]) -> str:
    return f"{size[0]}x{size[1]}"
