"""A non-finite value stops the step, and the step's rollouts are saved completely, with their
images, for inspection.
"""

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image as pil

from megatron_rl import training_loop
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.batching.packing import empty_batch
from megatron_rl.config import AlgoSettings, BatchSettings, FilterSettings, RunSettings, Settings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.errors import NonFiniteValue
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.run.failure_checks import require_finite
from megatron_rl.run.record import Run
from megatron_rl.types import Image, MicroBatch, Rollout, Status, TokenSequence, Turn


def rollout(sample: int, *, reward: float | None = 1.0, logprob: float = -0.5, gain: float = 0.0) -> Rollout:
    context = TokenSequence()
    context.extend([1, 1], images=(Image(pil.new("RGB", (28, 56), (sample, 0, 0)), None, (1, 4, 2), f"a{sample}", merge=2),))
    context.extend([7, 8], logprobs=[-0.25, logprob], versions=[3, 3])
    return Rollout(
        task="mine", example_id="e", group=0, sample_index=sample, sequences=[context], reward=reward, turns=[Turn(0, (2, 4), "?",
        reward_delta=gain)], status=Status.FAILED if reward is None else Status.COMPLETED, reason="sandbox down" if reward is None else "",
    )  # fmt: skip


def settings_for(folder: Path, **algo: object) -> Settings:
    batch, select = BatchSettings(prompts_per_step=1, group_size=3), FilterSettings(max_num_gen_batches=2, drop=["zero_std"])
    return Settings(run=RunSettings(dir=str(folder), max_failed_fraction=0.5), batch=batch, filter=select, algo=AlgoSettings(**algo))


@pytest.fixture
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (rollout(1, logprob=math.nan), "the engine's logprob of token 3 of sequence 0 of e#1 is nan"),
        (rollout(1, logprob=-math.inf), "the engine's logprob of token 3 of sequence 0 of e#1 is -inf"),
        (rollout(1, reward=math.inf), "task=mine: e#1 has the reward inf; fix its reward function"),
        (rollout(1, reward=math.nan), "task=mine: e#1 has the reward nan; fix its reward function"),
    ],
)
def test_the_steps_rollouts_are_kept(bad: Rollout, said: str, tmp_path: Path) -> None:
    """The non-finite value occurs in the second generation batch of a step whose first batch had no
    usable group. Both batches are saved, and the error names the file.
    """
    settings = settings_for(tmp_path / "run")
    rounds = [[rollout(0), rollout(1), rollout(2, reward=None)], [rollout(0, reward=0.0), bad, rollout(2)]]
    given = [each for played in rounds for each in played]
    run = Run(settings, read_world(), num_steps=9)
    assert not training_loop.has_enough_rollouts(rounds[0], settings=settings, algorithm=ALGORITHMS["grpo"], run=run, step=5)
    with pytest.raises(NonFiniteValue) as stopped:
        training_loop.has_enough_rollouts(given, settings=settings, algorithm=ALGORITHMS["grpo"], run=run, step=5)
    path = tmp_path / "run" / "not_finite" / "step_000005.jsonl"
    assert str(stopped.value) == f"step 5, {said}; the step's rollouts are saved in {path}; earlier checkpoints are kept"
    entries = read_recorded(path)
    assert [(entry.step, entry.kind, entry.num_rollouts, entry.num_failed) for entry in entries] == [(5, "kept", 6, 1)] * 6
    assert [repr(entry.rollout.sequences[0].rollout_logprobs) for entry in entries] == [
        repr(r.sequences[0].rollout_logprobs) for r in given
    ]
    assert [(entry.rollout.reward, entry.rollout.reason, entry.rollout.filter_reason) for entry in entries] == [
        (each.reward, each.reason, each.filter_reason) for each in given
    ]
    assert [entry.rollout.sequences[0].images[0].pil.getpixel((0, 0))[0] for entry in entries] == [0, 1, 2, 0, 1, 2]
    run.metrics_log.close()


@pytest.mark.usefixtures("world")
def test_nothing_is_kept_where_all_is_well(tmp_path: Path) -> None:
    """A failed rollout has no reward, and its missing reward is not an error."""
    run = Run(settings_for(tmp_path / "run"), read_world(), num_steps=9)
    with run.dump_on_error([rollout(0)], step=4):
        require_finite([rollout(0), rollout(1, reward=None)])
    assert not (tmp_path / "run" / "not_finite").exists()
    run.metrics_log.close()


@pytest.mark.usefixtures("world")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = Run(settings_for(tmp_path / "run"), read_world(), num_steps=9)
    (tmp_path / "run" / "not_finite").touch()
    with pytest.raises(OSError, match=r"^run.dir=.*/run: could not be written"), run.dump_on_error([rollout(0)], step=0):
        raise NonFiniteValue("a number")
    run.metrics_log.close()


@pytest.mark.usefixtures("world")
def test_patches_of_one_micro_batch_at_a_time_are_kept(tmp_path: Path) -> None:
    """The image patches of a whole update may not fit in memory, so each micro-batch is saved to
    its own file, numbered as in the error message. The patches of a micro-batch are freed before
    the next ones are computed.
    """
    run, batches, patches = (
        Run(settings_for(tmp_path / "run"), read_world(), num_steps=9),
        [empty_batch(length) for length in (2, 3, 4)],
        [],
    )

    def complete(batch: MicroBatch) -> MicroBatch:
        gc.collect()
        assert all(each() is None for each in patches), "the one before is gone"
        made = torch.full((batch.num_tokens, 5), float(batch.num_tokens))
        patches.append(weakref.ref(made))
        return replace(batch, patch_PC=made)

    told = pytest.raises(NonFiniteValue, match="step 4, micro-batch 1: it is nan; the micro-batches are saved in")
    with told, run.dump_batches_on_error(batches, step=4, load_image_patches=complete):
        raise NonFiniteValue("micro-batch 1: it is nan")
    for number, length in enumerate((2, 3, 4)):
        kept = torch.load(tmp_path / "run" / "not_finite" / f"step_00000004_rank_0_micro_batch_{number}.pt", weights_only=True)
        assert kept["token_T"].shape == (length,) and torch.equal(kept["patch_PC"], torch.full((length, 5), float(length)))
