"""Tests which protections a host provides and lacks, and that a pool starts only if its user has
accepted the missing ones by name."""

import asyncio
from dataclasses import fields

import pytest

from megatron_rl.config import SandboxSettings
from megatron_rl_sandbox import SandboxError, SandboxPool, host_report, pool
from megatron_rl_sandbox.layers import LAYER_NAMES, PROTECTIONS, REQUIRED_LAYERS, Layers, choose_layers, find_missing_protections

EVERYTHING: dict[str, str | None] = dict.fromkeys(LAYER_NAMES)
UNPRIVILEGED = EVERYTHING | {"drop_uid": "no root", "cgroup": "not delegated"}
NO_FILTER = {"crosstalk", "information", "kernel_calls"}


def lacking(**reasons: str) -> set[str]:
    return set(find_missing_protections(choose_layers(EVERYTHING | reasons)))


def test_what_is_open_without_which_layer():
    """The protections that a host lacks without a layer equal a hand-made list."""
    assert lacking() == set()
    assert lacking(drop_uid="no root", cgroup="not delegated") == set()  # the watchdog, rlimits and the filter cover everything
    assert lacking(landlock="old kernel") == set()  # a redundant layer
    assert lacking(seccomp="not x86-64") == NO_FILTER
    assert lacking(seccomp="not x86-64", cgroup="not delegated") == NO_FILTER | {"kernel_memory", "cores"}
    assert lacking(ipc_ns="refused") == {"queues", "information"}
    assert set(find_missing_protections(Layers())) == set(PROTECTIONS)


def test_what_may_be_accepted_is_what_a_room_can_lack():
    """`allow_missing` accepts exactly the protections that some isolated box can lack. The settings
    list them by hand because they do not import the sandbox's modules."""
    rooms = [
        choose_layers(EVERYTHING | {name: "no"} | other)
        for name in set(LAYER_NAMES) - {*REQUIRED_LAYERS, "watchdog"}
        for other in ({}, {"cgroup": "no"})
    ]
    rooms.append(choose_layers(EVERYTHING | {"cgroup": "no", "seccomp": "no"}))
    possible = set().union(*(find_missing_protections(layers) for layers in rooms))
    assert SandboxSettings(allow_missing=sorted(possible)).allow_missing == sorted(possible)
    for name in set(PROTECTIONS) - possible | {"everything"}:
        with pytest.raises(ValueError, match=f"task.sandbox.allow_missing={name}: choose one of "):
            SandboxSettings(allow_missing=[name])


def test_a_pool_starts_where_all_that_is_open_was_named(monkeypatch: pytest.MonkeyPatch):
    """A pool starts only if `allow_missing` contains every missing protection. The error names the
    missing ones."""
    offers = UNPRIVILEGED | {"seccomp": "not x86-64"}
    monkeypatch.setattr(pool, "detect_layers", lambda: offers)
    told = (
        r"lacks protections .*kernel_memory: code makes .*; cores: code .*"
        r"allow_missing=\[kernel_memory,cores,crosstalk,information,kernel_calls\] to run without"
    )
    with pytest.raises(SandboxError, match=told):
        asyncio.run(SandboxPool(size=1).start())
    with pytest.raises(SandboxError, match=r"allow_missing=\[cores\] to run without"):
        asyncio.run(SandboxPool(size=1, allow_missing=["kernel_memory", *NO_FILTER]).start())
    assert choose_layers(offers, allow_missing=["kernel_memory", "cores", *NO_FILTER]).watchdog
    with pytest.raises(ValueError, match="allow_missing names unknown protections cpu: choose from files, "):
        SandboxPool(allow_missing=["cpu"])


def test_the_doctor_says_what_is_held_and_what_is_open(monkeypatch: pytest.MonkeyPatch):
    """The doctor's report marks missing protections as OPEN, and its status follows
    `allow_missing`."""
    monkeypatch.setattr(host_report, "detect_layers", lambda: UNPRIVILEGED | {"seccomp": "not x86-64"})
    text, able = host_report.make_report()
    states = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.split()[:1] and line.split()[0] in PROTECTIONS}
    assert not able and "allow_missing=[kernel_memory," in text.splitlines()[-1]
    assert [name for name in PROTECTIONS if states[name] == "OPEN"] == [
        "kernel_memory",
        "cores",
        "crosstalk",
        "information",
        "kernel_calls",
    ]
    assert host_report.make_report(allow_missing=PROTECTIONS)[1]
    monkeypatch.setattr(host_report, "detect_layers", lambda: UNPRIVILEGED)
    assert host_report.make_report()[0].endswith("\nisolation: available") and host_report.make_report()[1]


def test_every_wall_is_held_by_layers_that_exist():
    layers = {item.name for item in fields(Layers)}
    assert all(names and names <= layers for wall in PROTECTIONS.values() for names in wall.enforced_by)


def test_the_doctor_warns_of_what_every_box_reads(monkeypatch: pytest.MonkeyPatch):
    """The doctor warns if the source lies below a path that every box reads."""
    monkeypatch.setattr(host_report, "SOURCE_DIR", "/usr/src/app")
    monkeypatch.setattr(host_report, "detect_layers", lambda: EVERYTHING)
    (warning,) = [line for line in host_report.make_report()[0].splitlines() if line.startswith("warning")]
    assert warning == "warning: the source (/usr/src/app) is below /usr, which code in every box can read: move it"
