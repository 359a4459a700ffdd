"""JSON records of rollouts for the page: members of a group, and an episode turn by turn."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any

from megatron_rl.observe.viewer.token_decoder import TokenDecoder
from megatron_rl.types import TOKEN_COLUMNS, Image, Rollout, TokenSequence, Turn

PAD_TOKEN_RUN = re.compile(r"(<\|(?:image|video)_pad\|>)\1*")
IMAGE_MARKUP = re.compile(r"<\|vision_start\|>(?:<\|(?:image|video)_pad\|>)+<\|vision_end\|>")
CHAT_MARKUP = re.compile(r"<\|im_end\|>\n?|<\|im_start\|>\w*\n?|<\|endoftext\|>")
"""Tokens of the chat template around a message."""
FIELDS = (
    "task", "example_id", "source", "question", "answer", "extra", "group", "sample_index", "reason", "reward", "outcome_reward",
    "filter_reason", "reward_terms", "wall_s", "env_s", "scoring_s",
)  # fmt: skip
"""Fields of a rollout that the page shows without conversion."""


def member_record(row_index: int, rollout: Rollout) -> dict[str, Any]:
    """Return a member of a group, with its mean advantage over the sampled tokens."""
    sampled = [
        advantage
        for context in rollout.sequences
        if context.advantages
        for advantage, mask in zip(context.advantages, context.loss_mask, strict=True)
        if mask
    ]
    return {
        "row_index": row_index, "sample_index": rollout.sample_index, "reward": rollout.reward, "reward_terms": rollout.reward_terms,
        "status": str(rollout.status), "stop_reason": str(rollout.stop_reason), "filter_reason": rollout.filter_reason,
        "reason": rollout.reason, "advantage": fmean(sampled) if sampled else None, "turns": [_turn_record(turn) for turn in rollout.turns],
    }  # fmt: skip


def episode_record(rollout: Rollout, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Return an episode: its fields, verdicts, turns with observations, and tokens with columns.

    The text of prompt, observations and tokens is decoded. `no_words` is the reason if that failed,
    else "".
    """
    (prompt, *observations), texts, no_words = _decode_texts(rollout, decoder)
    turns = [{**_turn_record(turn), "observation": said} for turn, said in zip(rollout.turns, observations, strict=True)]
    for turn, (earlier, later) in zip(turns, pairwise(rollout.turns), strict=False):
        turn["is_new_prompt"] = earlier.sequence != later.sequence
    return {
        **{name: getattr(rollout, name) for name in FIELDS}, "status": str(rollout.status), "stop_reason": str(rollout.stop_reason),
        "verdicts": [asdict(each) for each in rollout.verdicts], "turns": turns,
        "sequences": [_sequence_record(context, texts) for context in rollout.sequences],
        "no_words": no_words, "prompt": prompt, "first": [image_record(image) for image in prompt_images(rollout)],
    }  # fmt: skip


def image_record(image: Image) -> dict[str, Any]:
    """Return the key, the number of vision tokens and the patch grid of an image."""
    return {"key": image.key, "tokens": image.num_tokens, "grid": list(image.grid)}


def prompt_images(rollout: Rollout) -> list[Image]:
    """Return the images of the first prompt.

    The prompt's images are the images in the first sequence that were not added after a turn. An
    agent may return to the first sequence from another one.
    """
    if not rollout.sequences:
        return []
    images, added = rollout.sequences[0].images, [turn.images for turn, after in pairwise(rollout.turns) if after.sequence == 0]
    return images[: len(images) - sum(map(len, added))]


def _turn_record(turn: Turn) -> dict[str, Any]:
    call = turn.tool_call and {name: getattr(turn.tool_call, name) for name in ("tool", "source", "text", "error", "frame")}
    plain = ("text", "reward", "step_score", "reward_delta", "sequence", "generation_s", "env_s")
    return {
        **{name: getattr(turn, name) for name in plain}, "tool_call": call, "token_span": list(turn.token_span),
        "images": [image_record(image) for image in turn.images],
    }  # fmt: skip


def _decode_texts(rollout: Rollout, decoder: TokenDecoder | None) -> tuple[list[str], dict[int, str], str]:
    """Return the texts of prompt and observations, the text of each token id, and an error message.

    The first text is the prompt, with image placeholders merged. The others are the observation
    after each turn without markup of the chat template. All texts are "" if decoding failed;
    otherwise, the error message is "".
    """
    nothing = [""] * (1 + len(rollout.turns))
    if decoder is None:
        return nothing, {}, "no tokenizer was found"
    tokens = sorted({token for context in rollout.sequences for token in context.token_ids})
    parts = _observed_parts(rollout)
    try:
        words = decoder.decode([*parts, *([token] for token in tokens)])
    except ValueError as error:
        return nothing, {}, str(error)
    prompt = PAD_TOKEN_RUN.sub(lambda found: f"{found[1]} \u00d7 {len(found[0]) // len(found[1])} ", words[0])
    observations = [CHAT_MARKUP.sub("", IMAGE_MARKUP.sub("[image]", text)).strip() for text in words[1 : len(parts)]]
    return [prompt, *observations], dict(zip(tokens, words[len(parts) :], strict=True)), ""


def _observed_parts(rollout: Rollout) -> list[list[int]]:
    """Return the tokens of the prompt, and the tokens between each response and the next one.

    If the next response is in another sequence, they are that sequence's tokens before it. After
    the last response, they are the rest of its sequence.
    """
    parts, stop_of = [], dict.fromkeys(range(len(rollout.sequences)), 0)
    for turn in rollout.turns:
        start, stop = turn.token_span
        parts.append(rollout.sequences[turn.sequence].token_ids[stop_of[turn.sequence] : start])
        stop_of[turn.sequence] = stop
    last = rollout.turns[-1].sequence if rollout.turns else 0
    return [*parts, rollout.sequences[last].token_ids[stop_of[last] :] if rollout.sequences else []]


def _sequence_record(context: TokenSequence, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return a sequence's tokens and their columns; a token without text is replaced by its id."""
    names = ("loss_mask", "rollout_logprobs", "weight_versions", *TOKEN_COLUMNS)
    return {
        "tokens": [texts.get(token, str(token)) for token in context.token_ids],
        "columns": {name: getattr(context, name) for name in names if getattr(context, name)},
        "images": [image_record(image) for image in context.images],
    }
