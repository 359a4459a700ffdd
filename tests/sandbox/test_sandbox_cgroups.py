"""Control groups of both versions, played by plain folders; the real ones of this host are used by tests/sandbox/test_sandbox_limits.py."""

from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.types import Limits


def proc(folder: Path, *, groups: str, mounts: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def test_version_1_is_found_per_controller(tmp_path: Path):
    found = cgroups.own_groups(
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
    assert cgroups.own_groups(proc(tmp_path / "self", groups="4:memory:/jobsearch\n", mounts=mounts)) == {}


def test_version_2_limits_and_delegates(tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cgroup.subtree_control").write_text("")
    with pytest.raises(FileNotFoundError):  # plain folders lack what the kernel puts into a new group
        cgroups.Groups(size=1, limits=Limits(), parents=dict.fromkeys(cgroups.CONTROLLERS, own))
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert list(own.glob("sandbox-*")) == []


def test_version_1_limits(tmp_path: Path):
    parents = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    for place in parents.values():
        place.mkdir()
    limits = Limits(memory=1 << 20, disk=1 << 19, file=1 << 18, processes=7, cpus=1.5)
    groups = cgroups.Groups(size=2, limits=limits, parents=parents)
    (top,) = parents["memory"].iterdir()
    assert (top / "1" / "memory.limit_in_bytes").read_text() == str((1 << 20) + (1 << 19) + (1 << 19))
    assert (parents["pids"] / top.name / "0" / "pids.max").read_text() == "7"
    assert (parents["cpu"] / top.name / "0" / "cpu.cfs_quota_us").read_text() == "150000"
    groups.slots[1].join(12)
    assert [(parents[name] / top.name / "1" / "cgroup.procs").read_text() for name in cgroups.CONTROLLERS] == ["12"] * 3
    (top / "1" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert groups.slots[1].out_of_memory() == 3
    (top / "1" / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert groups.slots[1].out_of_memory() == 2


def test_a_missing_controller_is_named(tmp_path: Path):
    with pytest.raises(OSError, match="cpu, pids"):
        cgroups.Groups(size=1, limits=Limits(), parents={"memory": tmp_path})


def test_groups_of_a_dead_pool_are_swept(tmp_path: Path):
    parents = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    for place in parents.values():
        (place / "sandbox-4194305-0" / "3").mkdir(parents=True)  # above the largest process id there is
        (place / "sandbox-1-0" / "3").mkdir(parents=True)
    cgroups.Groups(size=1, limits=Limits(), parents=parents)
    for place in parents.values():
        assert not (place / "sandbox-4194305-0").exists()
        assert (place / "sandbox-1-0" / "3").exists()
