"""A representative part of `python -m sandbox attack`: one attack of every class, held by all layers, through without some."""

import asyncio
from collections import Counter

import pytest

from sandbox import SandboxFault
from sandbox.attack import PROBES, suite
from sandbox.attack.attempt import Attempt
from sandbox.attack.suite import Row, table
from sandbox.layers import NAMES, choose, offered

REPRESENTATIVES = (
    "read_through_symlink", "environ", "overwrite_file", "replace", "tcp4", "unix_abstract", "message_queue", "kill_all", "read_memory",
    "fork_bomb", "new_user_namespace", "host_keyring", "many_processes", "many_files", "ignores_signals", "raw_write",
)  # fmt: skip


def test_there_are_attacks_of_every_kind() -> None:
    """Issue 4: at least 40, in every class from 2 to 6; and each names something that its control does without."""
    sizes = Counter(probe.group for probe in PROBES)
    assert len(PROBES) >= 40
    assert all(2 <= size <= 6 for size in sizes.values()), sizes
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert all(probe.lifted or probe.raised or probe.bare for probe in PROBES)
    assert not set().union(*(probe.lifted for probe in PROBES)) - set(NAMES)
    assert {probe.group for probe in PROBES if probe.name in REPRESENTATIVES} == sizes.keys()


def test_attacks_are_held_and_their_controls_get_through() -> None:
    try:
        choose(offered())
    except SandboxFault as reason:
        pytest.skip(f"NOT TESTED, this host offers no room: {reason}")
    chosen = [probe for probe in PROBES if probe.name in REPRESENTATIVES]
    rows = asyncio.run(suite.run(chosen))
    assert all(row.good for row in rows), table(rows)
    skipped = [row.probe.name for row in rows if row.control is None]
    if skipped:
        pytest.skip(f"NOT TESTED, controls that need root: {', '.join(skipped)}")


def test_the_table_tells_a_breach_and_a_control_that_failed() -> None:
    """A suite that could not fail would prove nothing."""
    held, through = Attempt(succeeded=False, met="PermissionError"), Attempt(succeeded=True, met="")
    rows = {
        name: Row(PROBES[0], *pair) for name, pair in {"good": (held, through), "breach": (through, through), "void": (held, held)}.items()
    }
    assert {name: row.good for name, row in rows.items()} == {"good": True, "breach": False, "void": False}
    assert not Row(PROBES[0], Attempt(succeeded=False, met="", host_fault=True), through).good
    lines = table(list(rows.values())).splitlines()[2:]
    assert ["BREACHED" in line for line in lines] == [False, True, False]
    assert ["FAILED" in line for line in lines] == [False, False, True]
