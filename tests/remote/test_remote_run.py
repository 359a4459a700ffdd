"""Tests whole GRPO runs on inference servers. The training results equal those of a run with a
colocated engine.
"""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megatron_rl.io.jsonl import read_lines
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.paths import list_checkpoints
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.server_engine_run import SERVER_ENGINE_OVERRIDES
from tests.support.tcp_proxies import TcpProxy, open_proxies
from tests.support.vllm_servers import write_token_file

RUN = SUPPORT / "server_engine_run.py"
LIMIT_S = 280


def steps_of(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / "metrics.jsonl")[:-1]


def assert_alike(folder: Path, other: Path, *, num_steps: int = 3) -> None:
    """Check that two runs have equal rewards, losses and gradients in every step, and equal
    evaluations.
    """
    ours, theirs = steps_of(folder), steps_of(other)
    assert len(ours) == len(theirs) == num_steps
    for step, expected in zip(ours, theirs, strict=True):
        for name in ("step", "loss", "grad_norm", "reward/mean", "reward/std", "rollout/sampled_tokens", "policy/kl_ref"):
            assert step[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        assert step["grad_norm"] > 0 and step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4
    assert (folder / "eval.json").read_text() == (other / "eval.json").read_text()
    prompts = [{line["id"]: line["episodes"] for line in read_lines(each / "prompts.jsonl")} for each in (folder, other)]
    assert prompts[0] == prompts[1], "no step was played twice"
    gradients, expected = mean_gradients(folder), mean_gradients(other)
    assert gradients.keys() == expected.keys() and len(expected) > 20
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).abs().max()) <= 1e-5 * largest, name


def mean_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Return Adam's first moment of each parameter in the last checkpoint, which averages the
    gradients of all steps.
    """
    reader = FileSystemReader(list_checkpoints(folder / "checkpoints")[-1])
    kept = {name: kept for name, kept in reader.read_metadata().state_dict_metadata.items() if name.startswith("optimizer.state.exp_avg.")}
    moments = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in kept.items()}
    load(moments, storage_reader=reader, no_dist=True)
    return moments


def test_it_learns_what_a_colocated_run_learns(colocated: Path, urls: list[str], random_model: Path, tmp_path: Path) -> None:
    """A run with two servers, two trainer ranks, images and three turns has the same results as a
    colocated run. When all servers become unreachable, the run waits only for
    engine.outage_timeout_s, saves the completed steps although no checkpoint is due, and ends with
    one line. The same command resumes it.
    """
    words = (*SERVER_ENGINE_OVERRIDES, "engine.outage_timeout_s=2", f"engine.token_file={write_token_file(tmp_path)}")
    folder = tmp_path / "run"
    with open_proxies(urls) as two:
        command = (random_model, folder, *words, f"engine.urls=[{','.join(way.url for way in two)}]")
        cut: list[float] = []
        Thread(target=cut_after_a_step, args=(two, folder, cut), daemon=True).start()
        ended, names = fork_server.run_world(2, RUN, *command, timeout_s=LIMIT_S), ", ".join(way.url for way in two)
        why, said = f"none of {names} was healthy for 2 s (engine.outage_timeout_s)", ended.stdout
        num = len(read_metrics(folder / "metrics.jsonl"))
        failed = f"12 of 12 rollouts failed, above run.max_failed_fraction=0.1; first reason: {why}"
        line = rf"^{re.escape(f'stopped at step {num} of 3; {failed}')}; the last failure: http://\S+: /\w+: .*; the same command .*$"
        assert re.search(line, said, re.MULTILINE), said[-6000:]
        assert ended.returncode == os.EX_TEMPFAIL and 1 <= num < 3 and "waiting: " not in said
        assert time.monotonic() - cut[0] < 100, "run.outage_timeout_s, 600 s, is not added"
        assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step_{num:08d}"]
        for way in two:
            way.reopen()
        again = fork_server.run_world(2, RUN, *command, timeout_s=LIMIT_S)
        assert again.returncode == 0 and f"resume: {folder}/checkpoints/step_{num:08d}" in again.stdout, again.stdout[-6000:]
    assert_alike(folder, colocated)
    assert all(0 < step["weight_sync/transfer_s"] < step["weight_sync/pause_s"] for step in steps_of(folder))


def cut_after_a_step(two: Sequence[TcpProxy], folder: Path, cut: list[float]) -> None:
    """Close the proxies after the first step and append the time to `cut`."""
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text().count("\n"):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    cut.append(time.monotonic())
    for way in two:
        way.close()


def test_it_goes_on_while_the_trainer_works(urls: list[str], random_model: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """With run.max_staleness=1, rollouts are at most one update old, and the engine's logprobs are
    those of each token's weight version.
    """
    words = (
        *SERVER_ENGINE_OVERRIDES,
        "run.max_staleness=1",
        f"engine.urls=[{','.join(urls)}]",
        f"engine.token_file={write_token_file(tmp_path)}",
    )
    torchrun(1, RUN, random_model, tmp_path / "run", *words, timeout_s=LIMIT_S)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    assert max(step["rollout/staleness_max"] for step in steps) == 1
    assert max(step["rollout_mismatch/logprob_abs_diff_max"] for step in steps) <= 1e-4
