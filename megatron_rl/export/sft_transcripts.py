"""Export of the best recorded rollouts as SFT transcripts (rejection sampling).

OUT/transcripts.jsonl      one line per token sequence: {"messages": [...], "id", "source",
                           "question", "answer", "step", "reward"}, the format of
                           task.data.demonstrations; question and answer come from the dataset
OUT/images/KEY.png         images of the transcripts, as hard links if the file system allows it
"""

import os
import shutil
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.export.chat_messages import NotConvertible, sequence_to_messages
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.recorder import image_file_name
from megatron_rl.observe.rollout_store import list_step_files, read_columns, read_rollouts, step_number
from megatron_rl.observe.step_metrics import reward_of
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Message, Rollout, Status

TRANSCRIPTS_FILE = "transcripts.jsonl"


@dataclass(slots=True, frozen=True, order=True)
class ScoredRollout:
    """A scored rollout and its location. Instances are ordered by reward, then by step."""

    reward: float
    step: int
    row_index: int


@dataclass(slots=True, frozen=True)
class ConversionSettings:
    """Settings of the conversion from tokens to messages."""

    renderer: Renderer
    max_new_tokens: int


@dataclass(slots=True)
class ExportSummary:
    """Statistics of an export."""

    max_per_example: int
    """Maximum number of rollouts that are selected per example."""
    num_scored: int = 0
    rewards: list[float] = field(default_factory=list)
    """Rewards of the selected rollouts."""
    num_transcripts: int = 0
    skip_reasons: Counter[str] = field(default_factory=Counter)
    """Number of token sequences that were skipped, keyed by reason."""

    def __str__(self) -> str:
        mean = f", mean reward {statistics.fmean(self.rewards):.3f}" if self.rewards else ""
        share = f"{'one' if self.max_per_example == 1 else f'at most {self.max_per_example}'} per example: --best {self.max_per_example}"
        lines = [f"{len(self.rewards)} of {self.num_scored} rollouts ({share}){mean}: {self.num_transcripts} transcripts"]
        return "\n".join(lines + [f"left out: {num} sequences: {why}" for why, num in self.skip_reasons.most_common()])


def export_transcripts(
    folder: Path, out: Path, renderer: Renderer, *, max_per_example: int, min_reward: float, max_new_tokens: int, first_step: int = 0
) -> ExportSummary:
    """Export each example's best `max_per_example` rollouts since step `first_step`.

    Rollouts with a reward below `min_reward` are left out. If several rollouts of an example have
    the same text, only one is exported. Sequences with a response that was truncated at
    `max_new_tokens` are skipped.

    Raises:
        ValueError: A step is damaged, or no steps are recorded.
    """
    paths = {step_number(path): path for path in list_step_files(folder) if step_number(path) >= first_step}
    if not paths:
        raise ValueError(f"{folder}: contains no step >= {first_step} that was written with rollouts.save=all")
    exported = ExportSummary(max_per_example)
    chosen = select_best(paths, max_per_example=max_per_example, min_reward=min_reward, summary=exported)
    out.mkdir(parents=True, exist_ok=True)
    write_lines_atomically(
        out / TRANSCRIPTS_FILE, _transcript_records(paths, chosen, out, ConversionSettings(renderer, max_new_tokens), exported)
    )
    return exported


def select_best(paths: Mapping[int, Path], *, max_per_example: int, min_reward: float, summary: ExportSummary) -> list[ScoredRollout]:
    """Return the locations of each example's best rollouts, ordered by step.

    Among rollouts with equal rewards, a later step is preferred, because its policy is closer to
    the newest policy.
    """
    found: dict[str, dict[str, ScoredRollout]] = {}
    for step, path in paths.items():
        for row in read_columns(path, ["row_index", "example_id", "reward", "status", "responses"]).to_pylist():
            if row["status"] == Status.FAILED or row["reward"] is None:
                continue
            summary.num_scored += 1
            if row["reward"] >= min_reward:
                of_example, each = found.setdefault(row["example_id"], {}), ScoredRollout(row["reward"], step, row["row_index"])
                of_example[row["responses"]] = max(each, of_example.get(row["responses"], each))
    taken = [each for of_example in found.values() for each in sorted(of_example.values(), reverse=True)[:max_per_example]]
    return sorted(taken, key=lambda each: (each.step, each.row_index))


def _transcript_records(
    paths: Mapping[int, Path], chosen: Sequence[ScoredRollout], out: Path, conversion: ConversionSettings, summary: ExportSummary
) -> Iterator[dict[str, object]]:
    for step, path in paths.items():
        places = [each.row_index for each in chosen if each.step == step]
        for rollout in read_rollouts(path, places):
            summary.rewards.append(reward_of(rollout))
            for messages in _convert_rollout(rollout, conversion, summary):
                link_images(path.parent, out, (image.key for image in rollout.images))
                summary.num_transcripts += 1
                about = {"id": rollout.example_id, "source": rollout.source, "question": rollout.question, "answer": rollout.answer}
                yield {"messages": messages, **about, "step": step, "reward": rollout.reward}


def _convert_rollout(rollout: Rollout, conversion: ConversionSettings, summary: ExportSummary) -> Iterator[list[Message]]:
    keys = {id(image.pil): image.key for image in rollout.images}
    for context in rollout.sequences:
        if not any(context.loss_mask):
            continue
        try:
            yield [
                _replace_images(message, keys)
                for message in sequence_to_messages(context, conversion.renderer, max_new_tokens=conversion.max_new_tokens)
            ]
        except NotConvertible as why:
            summary.skip_reasons[str(why)] += 1


def _replace_images(message: Message, keys: Mapping[int, str]) -> Message:
    if isinstance(message["content"], str):
        return message
    names = [image_file_name(keys[id(part["image"])]) if part["type"] == "image" else "" for part in message["content"]]
    parts = [{**part, "image": name} if name else part for name, part in zip(names, message["content"], strict=True)]
    return {**message, "content": parts}


def link_images(folder: Path, out: Path, keys: Iterable[str]) -> None:
    """Create hard links in `out` to the images of recorded rollouts.

    If the directories are on different file systems, the images are copied.

    Raises:
        ValueError: An image is a symbolic link.
    """
    (out / image_file_name("x")).parent.mkdir(parents=True, exist_ok=True)
    for name in {image_file_name(key) for key in keys}:
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name}: is a symbolic link, which may point to any file; replace it with a copy of the image")
        with suppress(FileExistsError):
            try:
                os.link(folder / name, out / name)
            except OSError as error:
                if isinstance(error, FileExistsError) or not (folder / name).is_file():
                    raise
                shutil.copyfile(folder / name, out / name)
