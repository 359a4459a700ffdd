"""The best recorded rollouts as transcripts for a warm start: rejection sampling, where the run has done the sampling.

OUT/transcripts.jsonl      a line a context: {"messages": [...], "id", "source", "question", "answer", "step", "reward"}, as
                           task.data.demonstrations takes them; question and answer are those of the data
OUT/images/KEY.png         their pictures, hard links where the disk allows
"""

import os
import shutil
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.export.chat_messages import Untold, messages_of
from megatron_rl.io.jsonl import replace_lines
from megatron_rl.observe.recorder import name_of
from megatron_rl.observe.rollout_store import read_columns, read_rollouts, step_of, steps
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Message, Rollout, Status

TRANSCRIPTS = "transcripts.jsonl"


@dataclass(slots=True, frozen=True, order=True)
class Found:
    """A rollout that was scored, and where it is."""

    reward: float
    step: int
    place: int


@dataclass(slots=True, frozen=True)
class Way:
    """Back from tokens to messages."""

    renderer: Renderer
    cut_at: int


@dataclass(slots=True)
class Exported:
    """What came of it."""

    best: int
    """Rollouts that were taken of each example, at most."""
    num_scored: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of the rollouts that were taken."""
    num_transcripts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Contexts, by why they are none."""

    def __str__(self) -> str:
        mean = f", mean reward {statistics.fmean(self.rewards):.3f}" if self.rewards else ""
        share = f"{'one' if self.best == 1 else f'at most {self.best}'} per example: --best {self.best}"
        lines = [f"{len(self.rewards)} of {self.num_scored} rollouts ({share}){mean}: {self.num_transcripts} transcripts"]
        return "\n".join(lines + [f"left out: {num} contexts: {why}" for why, num in self.left_out.most_common()])


def export(folder: Path, out: Path, renderer: Renderer, *, best: int, min_reward: float, cut_at: int, first_step: int = 0) -> Exported:
    """Of each example the `best` rollouts from first_step on, none below min_reward and no two that say the same. cut_at: see messages_of.

    ValueError: a step is damaged, or nothing is recorded.
    """
    paths = {step_of(path): path for path in steps(folder) if step_of(path) >= first_step}
    if not paths:
        raise ValueError(f"{folder}: holds no step from {first_step} on that run.record=all wrote")
    exported = Exported(best)
    chosen = choose(paths, best=best, min_reward=min_reward, exported=exported)
    out.mkdir(parents=True, exist_ok=True)
    replace_lines(out / TRANSCRIPTS, _lines(paths, chosen, out, Way(renderer, cut_at), exported))
    return exported


def choose(paths: Mapping[int, Path], *, best: int, min_reward: float, exported: Exported) -> list[Found]:
    """The places of the best by example, in the order of steps; of equal ones the later: it is nearer to the policy that there is now."""
    found: dict[str, dict[str, Found]] = {}
    for step, path in paths.items():
        for row in read_columns(path, ["place", "example_id", "reward", "status", "said"]).to_pylist():
            if row["status"] == Status.FAILED or row["reward"] is None:
                continue
            exported.num_scored += 1
            if row["reward"] >= min_reward:
                of_example, each = found.setdefault(row["example_id"], {}), Found(row["reward"], step, row["place"])
                of_example[row["said"]] = max(each, of_example.get(row["said"], each))
    taken = [each for of_example in found.values() for each in sorted(of_example.values(), reverse=True)[:best]]
    return sorted(taken, key=lambda each: (each.step, each.place))


def _lines(paths: Mapping[int, Path], chosen: Sequence[Found], out: Path, way: Way, exported: Exported) -> Iterator[dict[str, object]]:
    for step, path in paths.items():
        places = [each.place for each in chosen if each.step == step]
        for rollout in read_rollouts(path, places):
            exported.rewards.append(rollout.reward)
            for messages in _told(rollout, way, exported):
                link_pictures(path.parent, out, (image.key for image in rollout.images))
                exported.num_transcripts += 1
                about = {"id": rollout.example_id, "source": rollout.source, "question": rollout.question, "answer": rollout.answer}
                yield {"messages": messages, **about, "step": step, "reward": rollout.reward}


def _told(rollout: Rollout, way: Way, exported: Exported) -> Iterator[list[Message]]:
    keys = {id(image.pil): image.key for image in rollout.images}
    for context in rollout.sequences:
        if not any(context.loss_mask):
            continue
        try:
            yield [_stored(message, keys) for message in messages_of(context, way.renderer, cut_at=way.cut_at)]
        except Untold as why:
            exported.left_out[str(why)] += 1


def _stored(message: Message, keys: Mapping[int, str]) -> Message:
    if isinstance(message["content"], str):
        return message
    names = [name_of(keys[id(part["image"])]) if part["type"] == "image" else "" for part in message["content"]]
    parts = [{**part, "image": name} if name else part for name, part in zip(names, message["content"], strict=True)]
    return {**message, "content": parts}


def link_pictures(folder: Path, out: Path, keys: Iterable[str]) -> None:
    """Have the pictures of a folder of rollouts in another one, without a second copy where both are on one disk."""
    (out / name_of("x")).parent.mkdir(parents=True, exist_ok=True)
    for name in {name_of(key) for key in keys}:
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name}: is a link, which may lead to anything; put a copy of the picture in its place")
        with suppress(FileExistsError):
            try:
                os.link(folder / name, out / name)
            except OSError as error:
                if isinstance(error, FileExistsError) or not (folder / name).is_file():
                    raise
                shutil.copyfile(folder / name, out / name)
