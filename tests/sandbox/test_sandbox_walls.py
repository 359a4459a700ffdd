"""What a host holds and what it leaves open, and that a pool starts there only where its user has named what is open."""

import asyncio
from dataclasses import fields

import pytest

from megatron_rl.config import SandboxSettings
from sandbox import Sandbox, SandboxFault, doctor, pool
from sandbox.layers import NAMES, REQUIRED, WALLS, Layers, choose, open_walls

EVERYTHING: dict[str, str | None] = dict.fromkeys(NAMES)
UNPRIVILEGED = EVERYTHING | {"drop_uid": "no root", "cgroup": "not delegated"}
NO_FILTER = {"crosstalk", "information", "kernel_calls"}


def lacking(**reasons: str) -> set[str]:
    return set(open_walls(choose(EVERYTHING | reasons)))


def test_what_is_open_without_which_layer():
    assert lacking() == set()
    assert lacking(drop_uid="no root", cgroup="not delegated") == set()  # the watchdog, rlimits and the filter hold it all
    assert lacking(landlock="old kernel") == set()  # a spare wall
    assert lacking(seccomp="not x86-64") == NO_FILTER
    assert lacking(seccomp="not x86-64", cgroup="not delegated") == NO_FILTER | {"kernel_memory", "cores"}
    assert lacking(ipc_ns="refused") == {"queues", "information"}
    assert set(open_walls(Layers())) == set(WALLS)


def test_what_may_be_accepted_is_what_a_room_can_lack():
    """The settings name them by hand, because they do without the sandbox's modules."""
    rooms = [choose(EVERYTHING | {name: "no"} | other) for name in set(NAMES) - {*REQUIRED, "watchdog"} for other in ({}, {"cgroup": "no"})]
    rooms.append(choose(EVERYTHING | {"cgroup": "no", "seccomp": "no"}))
    possible = set().union(*(open_walls(layers) for layers in rooms))
    assert SandboxSettings(allow_missing=sorted(possible)).allow_missing == sorted(possible)
    for name in set(WALLS) - possible | {"everything"}:
        with pytest.raises(ValueError, match=f"task.sandbox.allow_missing={name}: choose one of "):
            SandboxSettings(allow_missing=[name])


def test_a_pool_starts_where_all_that_is_open_was_named(monkeypatch: pytest.MonkeyPatch):
    offers = UNPRIVILEGED | {"seccomp": "not x86-64"}
    monkeypatch.setattr(pool, "offered", lambda: offers)
    told = r"leaves open .*kernel_memory: code has .*; cores: code .*accept=\[kernel_memory,cores,crosstalk,information,kernel_calls\] runs"
    with pytest.raises(SandboxFault, match=told):
        asyncio.run(Sandbox(size=1).start())
    with pytest.raises(SandboxFault, match=r"accept=\[cores\] runs here"):
        asyncio.run(Sandbox(size=1, accept=["kernel_memory", *NO_FILTER]).start())
    assert choose(offers, accept=["kernel_memory", "cores", *NO_FILTER]).watchdog
    with pytest.raises(ValueError, match="accept names cpu: there are files, "):
        Sandbox(accept=["cpu"])


def test_the_doctor_says_what_is_held_and_what_is_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "offered", lambda: UNPRIVILEGED | {"seccomp": "not x86-64"})
    text, able = doctor.report()
    states = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.split()[:1] and line.split()[0] in WALLS}
    assert not able and "accept=[kernel_memory," in text.splitlines()[-1]
    assert [name for name in WALLS if states[name] == "OPEN"] == ["kernel_memory", "cores", "crosstalk", "information", "kernel_calls"]
    assert doctor.report(accept=WALLS)[1]
    monkeypatch.setattr(doctor, "offered", lambda: UNPRIVILEGED)
    assert doctor.report()[0].endswith("\nisolation: available") and doctor.report()[1]


def test_every_wall_is_held_by_layers_that_exist():
    layers = {item.name for item in fields(Layers)}
    assert all(names and names <= layers for wall in WALLS.values() for names in wall.held_by)


def test_the_doctor_warns_of_what_every_box_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "SOURCE", "/usr/src/app")
    monkeypatch.setattr(doctor, "offered", lambda: EVERYTHING)
    (warning,) = [line for line in doctor.report()[0].splitlines() if line.startswith("warning")]
    assert warning == "warning: the source (/usr/src/app) lies below /usr, which code in every box reads: move it"
