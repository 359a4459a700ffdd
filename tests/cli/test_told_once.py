"""A mistake that every rank detects is reported in one line by one rank, however slow rank 0 is,
and every rank exits with code 1.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.cli.app import add_disk_full_hint, exit_with_error
from megatron_rl.distributed.world import SharedOSError, SharedValueError, World, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.services.supervised_process import find_free_port
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.single_process_policy import single_process_world


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallel.tp=3",), "error: parallel.tp=3: does not divide the model's 4 attention heads; use one of 1, 2"),
        (("optim.lr=-1",), "error: optim.lr=-1.0: must be a finite, non-negative number"),
    ],
)
def test_one_line_for_three_ranks(words: tuple[str, ...], said: str, random_model: Path, tmp_path: Path) -> None:
    port = find_free_port("127.0.0.1")
    given = ("experiment=numberline_grpo_cpu", f"model.path={random_model}", f"run.dir={tmp_path}/run", *words)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        fork_server.Process(
            SUPPORT / "unsynchronized_errors_train.py", *given, environment={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(3)
    ]
    try:
        lines = [line for rank in ranks for line in rank.communicate(timeout=150)[0].splitlines() if "error" in line]
    finally:
        for rank in ranks:
            rank.kill()
    assert lines == [said] and [rank.returncode for rank in ranks] == [1, 1, 1]


def test_what_ranks_do_together_is_raised_as_everybodys() -> None:
    """ValueError and OSError in raise_on_all_ranks and run_on_rank_zero are raised as their shared
    variants with the same message.
    """

    def fail(kind: type[Exception]) -> None:
        raise kind("words")

    with single_process_world():
        for act in (raise_on_all_ranks, run_on_rank_zero):
            for kind, shared in ((ValueError, SharedValueError), (OSError, SharedOSError)):
                with pytest.raises(shared, match="^words$"):
                    act(lambda kind=kind: fail(kind))


def test_a_disk_that_has_no_name_in_the_systems_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-space error from a process-shared lock contains no file name
    (tests/support/chaos_disks.py triggers one), so the line gets the names of the full disks as a
    prefix. All other lines stay unchanged.
    """
    free = {"/dev/shm": 100 << 10, "/mine": 4 << 20}
    monkeypatch.setattr(tempfile, "tempdir", "/mine")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[str(place)]))
    line = "[Errno 28] No space left on device"
    assert add_disk_full_hint(line).startswith(f"/dev/shm: {line}; free some") and "--shm-size" in add_disk_full_hint(line)
    free["/mine"] = 0
    assert add_disk_full_hint(line).startswith(f"/dev/shm and /mine: {line}; ")
    for other in (f"{line}: '/a'", f"run.dir=/a: could not be written ({line})", "[Errno 5] Input/output error"):
        assert add_disk_full_hint(other) == other


def test_a_run_that_ends_for_it_names_its_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ends because of a full disk prints which disks are full."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(SystemExit):
        exit_with_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    assert capsys.readouterr().err.startswith("error: /dev/shm and ")
