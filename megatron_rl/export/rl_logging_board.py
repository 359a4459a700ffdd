"""Export of recorded rollouts to RL Logging Board, with one JSON line per scored rollout.

    OUT/rollout_data_rank0.jsonl, rollout_data_rank0.1.jsonl, ...

The size of each file is bounded. Each line contains the fields that RL Logging Board reads. The
tokens are the sampled tokens of all turns. The values in `token_rewards` sum to the rollout's
reward. The reward delta of a turn is assigned to the turn's last token. The outcome reward is added
to the last token of the rollout. `ground_truth` is the recorded reference answer.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from megatron_rl.io.jsonl import to_json_line, write_bytes_atomically
from megatron_rl.observe.rollout_store import list_step_files, read_rollouts, step_number
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Rollout

MIB = 1 << 20


def write_board(folder: Path, out: Path, renderer: Renderer, *, file_mib: float, first_step: int = 0) -> int:
    """Export all rollouts from step `first_step` on, and return the number of exported rollouts.

    Raises:
        ValueError: A step is damaged, or no steps are recorded.
    """
    paths = [path for path in list_step_files(folder) if step_number(path) >= first_step]
    if not paths:
        raise ValueError(f"{folder}: contains no step >= {first_step} that was written with rollouts.save=all")
    out.mkdir(parents=True, exist_ok=True)
    word, number, num, held = cache(lambda token: renderer.tokenizer.decode([token])), 0, 0, bytearray()
    for path in paths:
        for rollout in read_rollouts(path, with_images=False):
            if rollout.reward is None or not rollout.num_sampled:
                continue
            line = to_json_line(_board_record(rollout, step_number(path), renderer, word)).encode() + b"\n"
            if held and len(held) + len(line) > file_mib * MIB:
                write_bytes_atomically(_file_path(out, number), bytes(held))
                number, held = number + 1, bytearray()
            held += line
            num += 1
    write_bytes_atomically(_file_path(out, number), bytes(held))
    for stale in {*out.glob("rollout_data_rank0.*.jsonl")} - {_file_path(out, each) for each in range(number + 1)}:
        stale.unlink()
    return num


def _file_path(out: Path, number: int) -> Path:
    return out / f"rollout_data_rank0{f'.{number}' if number else ''}.jsonl"


def _board_record(rollout: Rollout, step: int, renderer: Renderer, decode_token: Callable[[int], str]) -> dict[str, object]:
    sampled = list(_sampled_tokens(rollout))
    first = rollout.sequences[0]
    ids, logprobs = [each[0] for each in sampled], [each[1] for each in sampled]
    values, rewards = [each[2] for each in sampled], [each[3] for each in sampled]
    rewards[-1] += rollout.outcome_reward
    line = {
        "step": step,
        "prompt": renderer.tokenizer.decode(first.token_ids[: first.loss_mask.index(1)]),
        "response": "\n".join(turn.text for turn in rollout.turns),
        "response_tokens": [decode_token(token) for token in ids],
        "logprobs": logprobs,
        "token_rewards": rewards,
        "reward": rollout.reward,
        "example": rollout.example_id,
        "ground_truth": rollout.answer,
        "end": str(rollout.stop_reason),
    }
    return line if None in values else {**line, "values": values}


def _sampled_tokens(rollout: Rollout) -> Iterator[tuple[int, float, float | None, float]]:
    """Yield (token id, rollout logprob, value, reward) for every sampled token.

    The value is None if the run has no critic. The reward excludes the outcome reward.
    """
    for turn in rollout.turns:
        context, (first, last) = rollout.sequences[turn.sequence], turn.token_span
        for place in range(first, last):
            value = context.values[place] if context.values else None
            yield context.token_ids[place], context.rollout_logprobs[place], value, turn.reward_delta if place == last - 1 else 0.0
