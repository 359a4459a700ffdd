"""The environment of a rank: device, errors shared by all ranks, network interface, allocator
settings and timeouts.
"""

import os
import subprocess
import sys

import pytest
import torch

from megatron_rl.cli.app import exit_with_error
from megatron_rl.distributed.world import (
    SharedOSError,
    SharedValueError,
    connect,
    expand_segments,
    raise_on_all_ranks,
    read_world,
    round_up_to_minutes,
)
from megatron_rl.services.supervised_process import find_free_port
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server


def test_a_rank_of_the_second_node_takes_the_gpu_of_its_number_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a rank is that of its local rank on its node, not of its rank in the world."""
    told = {"RANK": 13, "WORLD_SIZE": 16, "LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    world = read_world()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.num_nodes) == (13, 16, 5, 8, 1, 2)
    assert world.device == torch.device("cuda", 5) and not world.is_main and not world.is_local_main


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_a_mistake_that_every_rank_raises_is_known_as_such(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error raised by every rank is marked as shared, so that only rank 0 prints it
    (cli/app.py).
    """

    def fail() -> None:
        raise kind("parallel.tp=3: too many")

    monkeypatch.setattr("megatron_rl.distributed.world.all_gather_object", lambda mine, *, group: [mine] * 3)
    with pytest.raises((SharedValueError, SharedOSError), match="^parallel.tp=3: too many$") as told:
        raise_on_all_ranks(fail)
    assert isinstance(told.value, kind)
    shown: list[bool] = []
    monkeypatch.setattr("megatron_rl.cli.app.exit_with_line", lambda line, world, *, on_all_ranks=False: shown.append(on_all_ranks))
    exit_with_error(told.value, read_world())
    exit_with_error(kind("another"), read_world())
    assert shown == [True, False]


def test_a_wrong_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If GLOO_SOCKET_IFNAME names no network interface, the error names the interface and the
    variable.
    """
    port = find_free_port("127.0.0.1")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "none0", "WORLD_SIZE": 1, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    line = r"^--nnodes=1: the 1 processes did not connect within parallel.timeout_s=5 \(.*none0.*\); .* GLOO_SOCKET_IFNAME .* interface"
    with pytest.raises(ValueError, match=line):
        connect(read_world(), timeout_s=5)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", ""),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", ""),
    ],
)
def test_segments_grow_unless_the_user_says_something(monkeypatch: pytest.MonkeyPatch, name: str, given: str, told: str) -> None:
    """Expandable segments are enabled in torch's allocator, which also exists on a CPU, unless the
    user has set an allocator option. The environment variables, which child processes would
    inherit, are unchanged.
    """
    torch._C._accelerator_setAllocatorSettings("")
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, given)
    before = dict(os.environ)
    expand_segments()
    assert torch._C._accelerator_getAllocatorSettings() == told and dict(os.environ) == before
    torch._C._accelerator_setAllocatorSettings("")


LOOK = """
import os, sys
class Look:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            sys.exit(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "nothing"))
sys.meta_path.insert(0, Look)
import megatron_rl.cli
"""


@pytest.mark.parametrize(("given", "told"), [({}, "1"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8")])
def test_megatron_may_count_on_one_queue_before_torch_is_there(given: dict[str, str], told: str) -> None:
    """Importing megatron_rl.cli sets CUDA_DEVICE_MAX_CONNECTIONS before torch is imported. A value
    set by the user is kept.
    """
    others = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", LOOK]
    ended = subprocess.run(command, env=others | given, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.strip() == told


def test_freed_blocks_leave_though_others_lie_between_them() -> None:
    """60 blocks of 6 MB with small allocations between them, as in any run, are freed. By default
    the C library keeps more than 50 of them; after trim_malloc it keeps less than 1 MiB.
    """
    script = SUPPORT / "heap_fragmentation.py"
    kept, left = (int(fork_server.run_script(script, *given, timeout_s=120).stdout.split()[-1]) for given in ((), ("returned",)))
    assert kept > 50 * (6 << 20) and left < 1 << 20


@pytest.mark.parametrize(("timeout_s", "minutes"), [(0.5, 1), (60.0, 1), (61.0, 2), (80.0, 2), (600.0, 10)])
def test_no_library_gives_up_before_the_timeout(timeout_s: float, minutes: int) -> None:
    """Timeouts in minutes are rounded up; 80 s was once rounded down to one minute."""
    assert round_up_to_minutes(timeout_s) == minutes
