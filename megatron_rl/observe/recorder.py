"""The best and the worst episodes of every step, for people: one jsonl file a step and one png for each distinct image.

    RUN/rollouts/step_000012.jsonl            a line an episode; `read` turns it back into records
    RUN/rollouts/images/KEY.png               KEY is Image.key: equal pixels are stored once
Paths inside the records are relative to the run folder, which can therefore be moved.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.observe.jsonl import read_lines, replace_bytes, replace_lines, to_number
from megatron_rl.types import End, Image, Rollout, Status

FOLDER = "rollouts"


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedContext:
    """What is kept of a context: sizes and pictures, not the tokens."""

    num_tokens: int
    num_sampled: int
    images: list[str]
    """Paths of png files relative to the run folder, in the order of the context."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedTurn:
    """A turn with its call; pictures by path."""

    context: int
    span: tuple[int, int]
    text: str
    reward: float
    score: float
    call: dict[str, str | bool] | None
    """The fields of types.ToolCall."""
    images: list[str]


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedRollout:
    """One line of a step's file. The fields that Rollout has too mean the same."""

    step: int
    kind: str
    """best or worst."""
    num_rollouts: int
    """Rollouts of the step in all..."""
    num_failed: int
    """...and those among them that failed through our own fault and are never recorded."""
    task: str
    example_id: str
    group: int
    sample: int
    weight_version: int
    status: Status
    end: End
    reason: str
    reward: float
    outcome: float
    rewards: dict[str, float]
    turns: list[RecordedTurn]
    contexts: list[RecordedContext]


class Recorder:
    """Writes into one run folder, on the main rank. One that starts at step k forgets the steps >= k of an earlier life of the run."""

    def __init__(self, run_dir: Path, *, best: int, worst: int, start_step: int = 0) -> None:
        assert min(best, worst) >= 0, f"best={best}, worst={worst}"
        self._run_dir = run_dir
        self._best, self._worst = best, worst
        for stale in sorted((run_dir / FOLDER).glob("step_*.jsonl")):
            if int(stale.stem.removeprefix("step_")) >= start_step:
                stale.unlink()

    def record(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write the best, then the worst of a step by reward; none twice; equal rewards in the order of group and sample.

        Leaves no file when there is nothing to tell: no rollout was scored, or none is wanted.
        """
        scored = [rollout for rollout in rollouts if rollout.status is not Status.FAILED]
        best_first = sorted(scored, key=lambda rollout: (-rollout.reward, rollout.group, rollout.sample))
        best = best_first[: self._best]
        worst = best_first[len(best) :][::-1][: self._worst]
        if not best and not worst:
            return
        counts = {"step": step, "num_rollouts": len(rollouts), "num_failed": len(rollouts) - len(scored)}
        records = [self._describe(rollout, kind="best", **counts) for rollout in best]
        records += [self._describe(rollout, kind="worst", **counts) for rollout in worst]
        folder = self._run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        replace_lines(folder / f"step_{step:06d}.jsonl", [asdict(record) for record in records])

    def _describe(self, rollout: Rollout, *, kind: str, step: int, num_rollouts: int, num_failed: int) -> RecordedRollout:
        return RecordedRollout(
            step=step, kind=kind, num_rollouts=num_rollouts, num_failed=num_failed,
            task=rollout.task, example_id=rollout.example_id, group=rollout.group, sample=rollout.sample,
            weight_version=rollout.weight_version, status=rollout.status, end=rollout.end,
            reason=rollout.reason, reward=rollout.reward, outcome=rollout.outcome, rewards=rollout.rewards,
            turns=[
                RecordedTurn(
                    context=turn.context, span=turn.span, text=turn.text, reward=turn.reward, score=turn.score,
                    call=None if turn.call is None else asdict(turn.call), images=self._store(turn.images),
                )
                for turn in rollout.turns
            ],
            contexts=[
                RecordedContext(
                    num_tokens=len(context.token_ids), num_sampled=sum(context.loss_mask), images=self._store(context.images)
                )
                for context in rollout.contexts
            ],
        )  # fmt: skip

    def _store(self, images: Iterable[Image]) -> list[str]:
        """The images' paths, relative to the run folder; a file is written the first time its key is seen."""
        names = []
        for image in images:
            assert image.key.isalnum(), f"Image.key {image.key!r} cannot name a file"
            name = f"{FOLDER}/images/{image.key}.png"
            path = self._run_dir / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                encoded = io.BytesIO()
                image.picture.save(encoded, format="PNG")
                replace_bytes(path, encoded.getvalue())
            names.append(name)
        return names


def read(path: Path) -> list[RecordedRollout]:
    """The records of one step's file; image paths stay relative to the run folder, which is `path.parents[1]`."""
    return [_from_line(line) for line in read_lines(path)]


def _from_line(line: dict) -> RecordedRollout:
    return RecordedRollout(
        **{
            **line,
            "status": Status(line["status"]),
            "end": End(line["end"]),
            "reward": to_number(line["reward"]),
            "outcome": to_number(line["outcome"]),
            "rewards": {name: to_number(value) for name, value in line["rewards"].items()},
            "turns": [
                RecordedTurn(
                    **{**turn, "span": tuple(turn["span"]), "reward": to_number(turn["reward"]), "score": to_number(turn["score"])}
                )
                for turn in line["turns"]
            ],
            "contexts": [RecordedContext(**context) for context in line["contexts"]],
        }
    )
