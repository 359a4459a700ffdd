"""Tests control groups of both versions on plain folders that stand in for them.
tests/sandbox/test_sandbox_limits.py uses the real control groups of the host."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_sandbox import cgroups
from megatron_rl_sandbox.box import Box
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.records import BoxLimits, Fault
from megatron_rl_sandbox.zygote_manager import ExitStatus, Interpreter, ZygoteManager


def proc(folder: Path, *, groups: str, mounts: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def test_version_1_is_found_per_controller(tmp_path: Path):
    """With version 1, the group of each controller is found from its own hierarchy and mount."""
    found = cgroups.find_own_groups(
        proc(
            tmp_path / "self",
            groups="8:pids:/\n4:memory:/jobs/a\n2:cpu,cpuacct:/jobs\n0::/\n",
            mounts="1 0 0:1 / /cg/pids rw - cgroup cgroup rw,pids\n2 0 0:2 /jobs /cg/memory rw shared:1 - cgroup cgroup rw,memory\n"
            "3 0 0:3 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n4 0 0:4 / /cg/unified rw - cgroup2 none rw\n",
        )
    )
    assert found == {"memory": Path("/cg/memory/a"), "pids": Path("/cg/pids"), "cpu": Path("/cg/cpu/jobs")}


def test_a_group_outside_of_what_is_mounted_is_not_found(tmp_path: Path):
    mounts = "2 0 0:2 /jobs /cg/memory rw - cgroup cgroup rw,memory\n"
    assert cgroups.find_own_groups(proc(tmp_path / "self", groups="4:memory:/jobsearch\n", mounts=mounts)) == {}


def test_version_2_limits_and_delegates(tmp_path: Path):
    """With version 2, the controllers are delegated to child groups. Setting limits fails on a
    plain folder, and no group remains."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cgroup.subtree_control").write_text("")
    with pytest.raises(FileNotFoundError):  # plain folders lack the files that the kernel creates in a new group
        cgroups.ControlGroups(size=1, limits=BoxLimits(), parents=dict.fromkeys(cgroups.CONTROLLERS, own))
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert list(own.glob("sandbox-*")) == []


def test_version_1_limits(tmp_path: Path):
    """With version 1, limits and process ids are written to the files of each slot's groups."""
    parents = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    for place in parents.values():
        place.mkdir()
    limits = BoxLimits(memory=1 << 20, disk=1 << 19, file=1 << 18, processes=7, cpus=1.5)
    groups = cgroups.ControlGroups(size=2, limits=limits, parents=parents)
    (top,) = parents["memory"].iterdir()
    assert (top / "1" / "memory.limit_in_bytes").read_text() == str((1 << 20) + (1 << 19) + (1 << 19))
    assert (parents["pids"] / top.name / "0" / "pids.max").read_text() == "7"
    assert (parents["cpu"] / top.name / "0" / "cpu.cfs_quota_us").read_text() == "150000"
    (top / "1" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    groups.slots[1].add_process(12)
    assert [(parents[name] / top.name / "1" / "cgroup.procs").read_text() for name in cgroups.CONTROLLERS] == ["12"] * 3


KILLED = ExitStatus(status=signal.SIGKILL, cpu_s=0.0)


@pytest.mark.parametrize("own", [False, True], ids=["the host's", "its own"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_want_of_memory_is_the_codes_only_at_the_groups_own_limit(tmp_path: Path, version: int, own: bool):
    """A kill for lack of memory is the code's fault only if the group reached its own limit,
    because the kernel counts the kills of every OOM killer in `oom_kill`. The limit is 1 GiB, and
    the peak usage half of it, or all but a page."""

    def counts(*, kills: int, at_limit: int) -> None:
        if version == 2:
            (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax {at_limit}\noom {at_limit}\noom_kill {kills}\n")
        else:
            (tmp_path / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")

    if version == 1:
        (tmp_path / "memory.limit_in_bytes").write_text(f"{1 << 30}\n")
        (tmp_path / "memory.memsw.max_usage_in_bytes").write_text(f"{1 << 30}\n")
    counts(kills=1, at_limit=2)
    group = cgroups.ControlGroup((tmp_path,))
    group.add_process(1)
    box = Box(
        1,
        zygote=ZygoteManager(Layers(pid_ns=True), BoxLimits()),
        limits=BoxLimits(),
        group=group,
        start_interpreter=None,
        release_slot=None,
    )
    life = Interpreter(1, 1, None, None, output_fds=(), exit_future=None, directory=None)
    box.reset_oom_counter()
    assert version == 2 or (tmp_path / "memory.memsw.max_usage_in_bytes").read_text().startswith("0")  # the kernel writes the current usage
    assert not group.was_oom_killed()
    counts(kills=2, at_limit=3 if own else 2)
    if version == 1:
        (tmp_path / "memory.memsw.max_usage_in_bytes").write_text(f"{(1 << 30) - 4096 if own else 1 << 29}\n")
    fault, limit, _ = box.diagnose_death(life, KILLED, channel_error="gone")
    assert (fault, limit) == ((Fault.CODE, "memory") if own else (Fault.HOST, None))
    group.close()


def test_a_missing_controller_is_named(tmp_path: Path):
    with pytest.raises(OSError, match="cpu, pids"):
        cgroups.ControlGroups(size=1, limits=BoxLimits(), parents={"memory": tmp_path})


def test_groups_of_a_dead_pool_are_swept(tmp_path: Path):
    """Groups of a pool whose process is dead are removed; those of a running process are kept."""
    parents = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    for place in parents.values():
        (place / "sandbox-4194305-0" / "3").mkdir(parents=True)  # above the largest possible process id
        (place / "sandbox-1-0" / "3").mkdir(parents=True)
    cgroups.ControlGroups(size=1, limits=BoxLimits(), parents=parents)
    for place in parents.values():
        assert not (place / "sandbox-4194305-0").exists()
        assert (place / "sandbox-1-0" / "3").exists()


def test_groups_of_a_pool_in_another_pid_namespace_are_kept(tmp_path: Path):
    """Groups are kept if a process that is not visible here has locked them, and removed once that
    process has been killed."""
    parents = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    for place in parents.values():
        (place / "sandbox-4194305-0" / "3").mkdir(parents=True)
    code = (
        "import fcntl, os, pathlib, sys, time\n"
        "for place in pathlib.Path(sys.argv[1]).glob('*/sandbox-*'):\n"
        "    fcntl.flock(os.open(place, os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        cgroups.ControlGroups(size=1, limits=BoxLimits(), parents=parents)
        assert all((place / "sandbox-4194305-0" / "3").exists() for place in parents.values())
        other.kill()
    cgroups.ControlGroups(size=1, limits=BoxLimits(), parents=parents)
    assert not any((place / "sandbox-4194305-0").exists() for place in parents.values())
