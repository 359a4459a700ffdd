"""Export for RL Logging Board, from rollouts whose values are computed by hand."""

import json
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.export.rl_logging_board import write_board
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Rollout, TokenSequence, Turn


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))


def two_turns(renderer: Renderer) -> Rollout:
    """Return a rollout with two turns in two sequences.

    The turns' reward deltas are 0.5 and -0.25, and the outcome reward is 2.
    """
    ids = [renderer.tokenizer(text)["input_ids"] for text in ("Which?", "one two", "So?", "three")]
    contexts = [TokenSequence(), TokenSequence()]
    for context, asked, said, base in ((contexts[0], ids[0], ids[1], 1.0), (contexts[1], ids[2], ids[3], 5.0)):
        context.extend(asked)
        context.extend(said, logprobs=[-base - place for place in range(len(said))], versions=[0] * len(said))
    spans = [(len(ids[0]), len(ids[0] + ids[1])), (len(ids[2]), len(ids[2] + ids[3]))]
    turns = [
        Turn(sequence=0, token_span=spans[0], text="one two", reward_delta=0.5),
        Turn(sequence=1, token_span=spans[1], text="three", reward_delta=-0.25),
    ]
    return Rollout(
        task="t", example_id="e", group=0, sample_index=0, sequences=contexts, turns=turns, reward=2.25, outcome_reward=2.0, answer="three"
    )


def test_a_rollout_token_by_token(renderer: Renderer, tmp_path: Path) -> None:
    """The exported line of a rollout has token rewards, tokens, logprobs and values as computed by
    hand. A failed rollout is left out."""
    rollout = two_turns(renderer)
    failed = Rollout(task="t", example_id="e", group=0, sample_index=1)
    write_step(step_path(tmp_path, 3), [rollout, failed], step=3, num_gen_batches=1)
    assert write_board(tmp_path, tmp_path / "board", renderer, file_mib=1) == 1
    (line,) = [json.loads(line) for line in (tmp_path / "board" / "rollout_data_rank0.jsonl").read_text().splitlines()]
    num = [last - first for first, last in (turn.token_span for turn in rollout.turns)]
    assert line["token_rewards"] == [0.0] * (num[0] - 1) + [0.5] + [0.0] * (num[1] - 1) + [1.75]
    assert sum(line["token_rewards"]) == line["reward"] == 2.25 and "values" not in line
    assert "".join(line["response_tokens"]) == "one twothree" and (line["prompt"], line["response"]) == ("Which?", "one two\nthree")
    assert line["logprobs"] == [-1.0 - place for place in range(num[0])] + [-5.0 - place for place in range(num[1])]
    assert (line["step"], line["ground_truth"], line["end"]) == (3, "three", "done")
    for context in rollout.sequences:
        context.set_column("values", [0.125] * len(context.token_ids))
    write_step(step_path(tmp_path, 3), [rollout], step=3, num_gen_batches=1)
    write_board(tmp_path, tmp_path / "board", renderer, file_mib=1)
    assert json.loads((tmp_path / "board" / "rollout_data_rank0.jsonl").read_text())["values"] == [0.125] * sum(num)


def test_files_are_bounded(renderer: Renderer, tmp_path: Path) -> None:
    """Files stay below the size limit.

    They contain complete lines, in order, and no line is lost.
    """
    for step in range(6):
        write_step(step_path(tmp_path, step), [two_turns(renderer)] * 2, step=step, num_gen_batches=1)
    assert write_board(tmp_path, tmp_path / "board", renderer, file_mib=700 / (1 << 20), first_step=1) == 10
    files = [tmp_path / "board" / f"rollout_data_rank0{name}.jsonl" for name in ("", *(f".{number}" for number in range(1, 12)))]
    files = [file for file in files if file.exists()]
    assert len(files) > 2 and all(file.stat().st_size <= 700 for file in files)
    assert [json.loads(line)["step"] for file in files for line in file.read_text().splitlines()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    (tmp_path / "board" / "notes.jsonl").write_text("mine")
    assert write_board(tmp_path, tmp_path / "board", renderer, file_mib=1, first_step=5) == 2
    left = {file.name for file in (tmp_path / "board").iterdir()}
    assert left == {"rollout_data_rank0.jsonl", "notes.jsonl"}, "what an earlier, larger one wrote is read as this one's"
    with pytest.raises(ValueError, match=r"contains no step >= 9 that was written with rollouts.save=all$"):
        write_board(tmp_path, tmp_path / "board", renderer, file_mib=1, first_step=9)
