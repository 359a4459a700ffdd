"""Columns of a recorded step: every field of a rollout, and values derived for searching."""

import math
from enum import StrEnum
from types import NoneType
from typing import Any, get_args, get_origin

import pyarrow as pa

from megatron_rl.io.rollout_codec import RECORD_FIELDS
from megatron_rl.types import Image, Rollout

SCALAR_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_(), bytes: pa.string(), Image: pa.string()}
IMAGE_TYPE = pa.struct([("name", pa.string()), ("grid", pa.list_(pa.int64())), ("merge", pa.int64())])
SUMMARY_SCHEMA = pa.schema(
    [
        ("step", pa.int64()), ("row_index", pa.int64()), ("num_turns", pa.int64()), ("num_tokens", pa.int64()), ("num_sampled", pa.int64()),
        ("num_images", pa.int64()), ("tools", pa.list_(pa.string())), ("num_errors", pa.int64()), ("oldest_version", pa.int64()),
        ("responses", pa.string()), ("first_image", pa.string()), ("logprob_abs_diff_max", pa.float64()),
    ]
)  # fmt: skip
"""Columns derived from a rollout for searching.

`row_index` is the index within the step. `responses` contains the policy's responses, joined by
line breaks. `first_image` is the key of the rollout's first image, "" without images.
`logprob_abs_diff_max` is the metric rollout_mismatch/logprob_abs_diff_max of the single rollout,
null if the trainer computed no logprobs of its on-policy tokens.
"""


def arrow_type(annotation: Any) -> pa.DataType:
    """Return the Arrow type for a field annotation, as io/rollout_codec.py encodes the field."""
    parts = get_args(annotation)
    if annotation in RECORD_FIELDS:
        return pa.struct([(name, arrow_type(part)) for name, part in RECORD_FIELDS[annotation].items()])
    if annotation in SCALAR_TYPES:
        return SCALAR_TYPES[annotation]
    if get_origin(annotation) is dict:
        return pa.map_(pa.string(), arrow_type(parts[1]))
    if get_origin(annotation) in (list, tuple):
        return pa.list_(arrow_type(parts[0]))
    if NoneType in parts:
        return arrow_type(parts[0])
    assert issubclass(annotation, StrEnum), f"rollout_schema.py has no column type for {annotation}"
    return pa.string()


SCHEMA = pa.schema(
    [*SUMMARY_SCHEMA, ("version", pa.int64()), ("images", pa.map_(pa.string(), IMAGE_TYPE)),
     *((name, arrow_type(kind)) for name, kind in RECORD_FIELDS[Rollout].items())]
)  # fmt: skip


def summarize_rollout(rollout: Rollout, *, step: int, row_index: int) -> dict[str, Any]:
    """Return the values of SUMMARY_SCHEMA for a rollout."""
    calls = [turn.tool_call for turn in rollout.turns if turn.tool_call is not None]
    return {
        "step": step,
        "row_index": row_index,
        "num_turns": len(rollout.turns),
        "num_tokens": sum(len(context.token_ids) for context in rollout.sequences),
        "num_sampled": rollout.num_sampled,
        "num_images": len({image.key for image in rollout.images}),
        "tools": [call.tool for call in calls],
        "num_errors": sum(bool(call.error) for call in calls),
        "oldest_version": rollout.oldest_version,
        "responses": "\n".join(turn.text for turn in rollout.turns),
        "first_image": next((image.key for image in rollout.images), ""),
        "logprob_abs_diff_max": _logprob_abs_diff_max(rollout, step),
    }


def _logprob_abs_diff_max(rollout: Rollout, step: int) -> float | None:
    """Return the largest difference between engine and trainer logprobs of a rollout.

    Only tokens that the weights of `step` sampled are compared, as in algo/objective.py.
    """
    differences = [
        abs(old - sampled)
        for context in rollout.sequences
        if context.old_logprobs
        for old, sampled, version in zip(context.old_logprobs, context.rollout_logprobs, context.weight_versions, strict=True)
        if version == step
    ]
    return None if not differences else max(differences) if not any(map(math.isnan, differences)) else math.nan
