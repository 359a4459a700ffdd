"""The store of all rollouts: reading back everything, single columns and single rows; its size
limit, with bytes counted by hand; resuming; and damaged files.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.observe.recorder import BestWorstRecorder, save_images
from megatron_rl.observe.recorder import read_recorded as entries_of
from megatron_rl.observe.rollout_store import (
    SUMMARY_SCHEMA,
    RolloutStore,
    list_step_files,
    num_rows,
    read_columns,
    read_num_gen_batches,
    read_rollouts,
    step_path,
    without_training_columns,
    write_step,
)
from megatron_rl.types import TOKEN_COLUMNS, Rollout, Status, StopReason, TokenSequence, ToolCall, Turn
from tests.observe.test_recorder import picture, rollout

BYTES = 20_000
"""More bytes than the file of a few small rollouts has, but fewer than a noise image has."""


def many(num: int = 150) -> list[Rollout]:
    return [rollout(sample, None if sample % 7 == 3 else sample / 8, images=(picture(sample % 5),)) for sample in range(num)]


def full() -> Rollout:
    """Return a rollout in which no field has its default value."""
    image = picture(0)
    context = TokenSequence()
    context.extend([1, 2, 3], images=(image,))
    context.extend([4, 5], logprobs=[-0.1, -math.inf], versions=[6, 7])
    for column in TOKEN_COLUMNS:
        context.set_column(column, [0.1, math.nan, -0.0, 1e-300, 3.0])
    call = ToolCall(tool="zoom", source='{"box": [1, 2]}', text="\u00e9\u2028", error="no", ran=False)
    turn = Turn(
        sequence=0, token_span=(3, 5), text="a\nb", action_start=4, reward=0.5, step_score=0.25, reward_delta=0.1, tool_call=call,
        images=[image], state="s", generation_s=2.0, env_s=0.5,
    )  # fmt: skip
    return Rollout(
        task="t", example_id="e", group=2, sample_index=3, source="vstar",
        question="<image>\nHow many?", answer="4", extra='{"index": 7}', sequences=[context, TokenSequence()], turns=[turn],
        status=Status.TRUNCATED, stop_reason=StopReason.MAX_TURNS,
        reason="r", reward=0.3, outcome_reward=0.2, filter_reason="surplus", reward_terms={"a": math.inf, "b": -1.5},
        wall_s=1.0, env_s=0.5, scoring_s=0.25,
    )  # fmt: skip


def test_rollouts_come_back(tmp_path: Path) -> None:
    """All rollouts are read back equal, with the same pixels. Selected rows are read back from any
    row group.
    """
    rollouts = [full(), *many()]
    RolloutStore(tmp_path, max_gb=1).record_step(12, rollouts, num_gen_batches=3)
    path = step_path(tmp_path / "rollouts", 12)
    assert read_num_gen_batches(path) == 3 and num_rows(path) == 151 and list_step_files(tmp_path / "rollouts") == [path]
    assert repr(read_rollouts(path)[0].sequences[0].returns) == repr(rollouts[0].sequences[0].returns), "NaN and the sign of zero too"
    pixels = read_rollouts(path, [140])[0].images[0]
    assert pixels.pil.tobytes() == rollouts[140].images[0].pil.tobytes() and pixels.patch_PC is None
    bare = read_rollouts(path, with_images=False)
    for each in rollouts:
        each.drop_patches()
    without = [str(each).replace(str(each.images[0].pil), "None") for each in rollouts]
    assert [str(each) for each in bare] == without
    places = [150, 3, 64, 63, 0]
    assert [each.sample_index for each in read_rollouts(path, places)] == [149, 2, 63, 62, 3]


def test_columns_are_read_without_the_rest(tmp_path: Path) -> None:
    path = step_path(tmp_path, 4)
    write_step(path, [full(), rollout(1, None)], step=4, num_gen_batches=1)
    first, second = read_columns(path, [*SUMMARY_SCHEMA.names, "reward"]).to_pylist()
    assert list(first.values()) == [4, 0, 1, 5, 2, 1, ["zoom"], 1, 6, "a\nb", picture(0).key, None, 0.3]
    assert list(second.values()) == [4, 1, 1, 5, 2, 0, [], 0, 7, "+", "", None, None]
    with pytest.raises(ValueError, match=r"step_000004.parquet: lacks mood; it was written by another version of this program$"):
        read_columns(path, ["reward", "mood"])


def test_mismatch_of_a_rollout(tmp_path: Path) -> None:
    """The column is the largest difference of the logprobs of engine and trainer over the tokens
    that the step's own weights sampled, by hand. NaN stays NaN.
    """
    made = [rollout(1, 1.0) for _ in range(3)]
    for each, logprob in zip(made, (-0.25, -0.5, math.nan), strict=True):
        context = TokenSequence()
        context.extend([1, 2])
        context.extend([3, 4, 5], logprobs=[-0.5, logprob, -1.0], versions=[4, 4, 3])
        context.set_column("old_logprobs", [0.0, 0.0, -0.375, -0.5, -9.0])
        each.sequences = [context]
    write_step(step_path(tmp_path, 4), made, step=4, num_gen_batches=1)
    found = read_columns(step_path(tmp_path, 4), ["logprob_abs_diff_max"])["logprob_abs_diff_max"].to_pylist()
    assert found[:2] == [0.25, 0.125] and math.isnan(found[2])


def test_half_characters_cost_no_step(tmp_path: Path) -> None:
    """Lone surrogates in any text are stored as question marks; all other data is unchanged."""
    rollouts = [full(), rollout(1, 1.0)]
    rollouts[0].turns[0].tool_call = replace(rollouts[0].turns[0].tool_call, text="a\ud800b\u00e9")
    rollouts[0].reason, rollouts[0].reward_terms = "\udfff", {"x\ud800": 1.0}
    write_step(step_path(tmp_path, 0), rollouts, step=0, num_gen_batches=1)
    found = read_rollouts(step_path(tmp_path, 0), with_images=False)
    assert (found[0].turns[0].tool_call.text, found[0].reason, found[0].reward_terms) == ("a?b\u00e9", "?", {"x?": 1.0})
    assert found[0].sequences[0].token_ids == rollouts[0].sequences[0].token_ids and found[1].turns == rollouts[1].turns


def test_as_played() -> None:
    """without_training_columns removes what a replay computes again and keeps what was sampled."""
    again = without_training_columns(full())
    assert not again.filter_reason and not any(getattr(again.sequences[0], column) for column in TOKEN_COLUMNS)
    assert again.sequences[0].rollout_logprobs == [0.0, 0.0, 0.0, -0.1, -math.inf] and again.turns[0].reward_delta == 0.1


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    """Old steps are removed to stay within the limit, together with images that neither a later
    step nor the best and worst rollouts use.
    """
    folder, keys = tmp_path / "rollouts", [picture(seed, width=112, height=112).key for seed in range(4)]
    shown = [[0, 1, 2], [1, 3], [3]]
    BestWorstRecorder(tmp_path, num_best=1, num_worst=0).record(0, [rollout(0, 1.0, images=(picture(2, width=112, height=112),))])
    bank = RolloutStore(tmp_path, max_gb=1.0)
    for step, seeds in enumerate(shown[:2]):
        bank.record_step(step, [rollout(seed, 1.0, images=(picture(seed, width=112, height=112),)) for seed in seeds], num_gen_batches=1)
    lines = (folder / "step_000000.jsonl").stat().st_size
    figures = bank.metrics()
    assert round(figures["store/gb"] * 1e9) == bytes_of(folder) - lines > 4 * BYTES and figures["store/rollouts"] == 5
    room = (bytes_of(folder) - lines) / 1e9
    bank = RolloutStore(tmp_path, max_gb=room)
    bank.record_step(2, [rollout(3, 1.0, images=(picture(3, width=112, height=112),))], num_gen_batches=1)
    left = {path.stem for path in (folder / "images").iterdir()}
    assert left == {keys[1], keys[2], keys[3]} and [path.name for path in list_step_files(folder)] == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    assert bank.metrics() == {"store/gb": pytest.approx(bank.metrics()["store/gb"]), "store/rollouts": 3.0, "store/evicted": 3.0}
    assert len(read_rollouts(step_path(folder, 1))) == 2, "its pictures are all there"
    tiny = RolloutStore(tmp_path, max_gb=1e-9)
    tiny.record_step(3, many(3), num_gen_batches=1)
    assert [path.name for path in list_step_files(folder)] == ["step_000003.parquet"], "the newest stays whatever it takes"


def test_a_bank_holds_what_lies_there(tmp_path: Path) -> None:
    """A store that is opened again counts the rollouts on disk; a store in a new folder has no
    metrics.
    """
    bank = RolloutStore(tmp_path, max_gb=1.0)
    for step in range(4):
        bank.record_step(step, many(2), num_gen_batches=1)
    assert RolloutStore(tmp_path, max_gb=1.0).metrics()["store/rollouts"] == 8.0
    assert RolloutStore(tmp_path / "new", max_gb=1.0).metrics() == {}


def test_spoiled_files_of_an_earlier_life(tmp_path: Path) -> None:
    """Record lines that are truncated or of another version keep their images, and an image that
    was deleted takes no space. The store refuses a step file that cannot be read, and the error
    states the fix.
    """
    folder, shown = tmp_path / "rollouts", [picture(seed, width=112, height=112) for seed in range(3)]
    recorder, bank = BestWorstRecorder(tmp_path, num_best=1, num_worst=0), RolloutStore(tmp_path, max_gb=1.0)
    for step, image in enumerate(shown):
        recorder.record(step, [rollout(0, 1.0, images=(image,))])
        bank.record_step(step, [rollout(0, 1.0, images=(image,))], num_gen_batches=1)
    for step, spoil in enumerate((lambda text: text.replace("version", "revision", 1), lambda text: text[: text.index(".png") + 4])):
        lines = folder / f"step_{step:06d}.jsonl"
        lines.write_text(spoil(lines.read_text()))
        assert told_by(lambda: entries_of(lines, with_images=False)) or not entries_of(lines, with_images=False)  # noqa: B023 - it is called here
    (folder / "step_000002.jsonl").unlink()
    (folder / "images" / f"{shown[2].key}.png").unlink()
    bank = RolloutStore(tmp_path, max_gb=1e-9)
    bank.record_step(3, many(1), num_gen_batches=1)
    assert [path.name for path in list_step_files(folder)] == ["step_000003.parquet"]
    assert {shown[0].key, shown[1].key} < {path.stem for path in (folder / "images").iterdir()}
    step_path(folder, 3).write_bytes(b"PAR1")
    line = told_by(lambda: RolloutStore(tmp_path, max_gb=1.0))
    assert line.startswith(f"{step_path(folder, 3)}: cannot be read (") and line.endswith(
        "; move the file to another folder to continue the run without it"
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    rollouts = [full(), *many(5)]
    save_images(folder, rollouts)
    write_step(step_path(folder, 0), rollouts, step=0, num_gen_batches=1)
    return folder


def told_by(read: Callable[[], object]) -> str:
    """Return the message of the ValueError that this call raises, or ""."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_told_in_a_line(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """If any bytes of a file are changed or missing, its rollouts are read or a ValueError names
    the file.
    """
    content = bytearray(step_path(whole, 0).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = step_path(tmp_path, 0)
    path.write_bytes(content[: data.draw(st.sampled_from((len(content), len(content) // 2, 3)))])
    for read in (
        lambda: read_rollouts(path, with_images=False),
        lambda: read_columns(path, ["reward", "responses"]),
        lambda: read_num_gen_batches(path),
    ):
        told = told_by(read)
        assert not told or told.startswith(str(path)), told


def test_a_picture_that_lacks_is_named(whole: Path, tmp_path: Path) -> None:
    """A missing image file is named in the error; rows without that image can still be read."""
    shutil.copytree(whole, tmp_path / "bank")
    path = step_path(tmp_path / "bank", 0)
    key = picture(4).key
    (path.parent / "images" / f"{key}.png").unlink()
    with pytest.raises(ValueError, match=rf"step_000000.parquet: .*{key}.png: cannot read the image"):
        read_rollouts(path)
    assert read_rollouts(path, [0, 1])[1].sample_index == 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = step_path(tmp_path, 0)
    write_step(path, [full()], step=0, num_gen_batches=1)
    pq.write_table(pq.read_table(path).drop_columns(["turns"]).replace_schema_metadata(None), path)
    with pytest.raises(ValueError, match=r"step_000000.parquet: contains no step written with rollouts.save=all$"):
        read_num_gen_batches(path)
    with pytest.raises(ValueError, match=r"step_000000.parquet: rollout record: rollout: \['turns'\]: lacking"):
        read_rollouts(path, with_images=False)
