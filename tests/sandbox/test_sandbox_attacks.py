"""Runs a representative part of `python -m megatron_rl_sandbox attack`: one attack of every class fails with
all layers, and the controls of some of them succeed without some layers. A long test runs the
controls of all."""

import asyncio
import os
import platform
import subprocess
import sys
from collections import Counter

import pytest

from megatron_rl_sandbox import SandboxError
from megatron_rl_sandbox.attack import PROBES, suite
from megatron_rl_sandbox.attack.attack_run import AttackOutcome
from megatron_rl_sandbox.attack.suite import AttackResult, format_table
from megatron_rl_sandbox.layers import LAYER_NAMES, choose_layers, detect_layers
from tests.conftest import ROOT

REPRESENTATIVES = (
    "read_through_symlink", "environ", "overwrite_file", "replace", "tcp4", "unix_abstract", "message_queue", "kill_all", "read_memory",
    "fork_bomb", "new_user_namespace", "host_keyring", "many_processes", "many_files", "ignores_signals", "raw_write",
    "large_pipes", "first_thread_gone", "choose_cores", "inotify", "host_figures", "clone3_namespace", "segments", "kill_as_kernel",
)  # fmt: skip

CONTROLLED = ("read_through_symlink", "environ", "kill_all", "read_memory", "many_processes", "choose_cores", "clone3_namespace")

UNPRIVILEGED = ("read_file", "page_tables", "first_thread_gone", "choose_cores")
"""Attacks that are stopped by other layers without privileges than where control groups are
available."""


def test_there_are_attacks_of_every_kind() -> None:
    """Issue 4: there are at least 40 attacks, 2 to 6 in every class. Each attack names the layer,
    the limit or the isolated child that its control does without."""
    sizes = Counter(probe.group for probe in PROBES)
    assert len(PROBES) >= 40
    assert all(2 <= size <= 6 for size in sizes.values()), sizes
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert all(probe.lifted_layers or probe.raised_limits or probe.uses_plain_child for probe in PROBES)
    assert not set().union(*(probe.lifted_layers for probe in PROBES)) - set(LAYER_NAMES)
    assert {probe.group for probe in PROBES if probe.name in REPRESENTATIVES} == sizes.keys()


@pytest.fixture(scope="module")
def isolating_host() -> None:
    """Skip the attacks on a host that cannot isolate a box."""
    try:
        choose_layers(detect_layers())
    except SandboxError as reason:
        pytest.skip(f"NOT TESTED, this host offers no room: {reason}")


@pytest.mark.usefixtures("isolating_host")
def test_attacks_are_held() -> None:
    """Every representative attack fails with all layers."""
    chosen = [probe for probe in PROBES if probe.name in REPRESENTATIVES]
    outcomes, _ = asyncio.run(suite.run_attacks(chosen))
    assert {probe.name: each for probe, each in zip(chosen, outcomes, strict=True) if each.succeeded or each.host_fault} == {}


@pytest.mark.usefixtures("isolating_host")
@pytest.mark.parametrize("names", [CONTROLLED, pytest.param(REPRESENTATIVES, marks=pytest.mark.long)], ids=["some", "all"])
def test_controls_get_through(names: tuple[str, ...]) -> None:
    """Attacks that fail with all layers succeed in their controls."""
    rows = asyncio.run(suite.run_suite([probe for probe in PROBES if probe.name in names]))
    assert all(row.has_passed for row in rows), format_table(rows)
    skipped = [row.probe.name for row in rows if row.control is None]
    if skipped:
        pytest.skip(f"NOT TESTED, controls that this host cannot show: {', '.join(skipped)}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_attacks_are_held_without_privilege() -> None:
    """The attacks fail with a user namespace and the watchdog in place of control groups. Their
    controls succeed there too."""
    command = (sys.executable, ROOT / "tests/support/unprivileged.py", sys.executable, "-m", "megatron_rl_sandbox", "attack", *UNPRIVILEGED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False, env=environment)
    summary = f"{len(UNPRIVILEGED)} probes: 0 attacks succeeded, 0 controls failed, 0 controls skipped on this host"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, summary), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("release", "cores", "lacks"),
    [("6.18-rc3", 2, ""), ("6.18.44-fc", 2, ""), ("5.10", 2, "needs Linux 5.12"), ("6.18", 1, "needs 2 cores, this host has 1")],
)
def test_what_a_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch, release: str, cores: int, lacks: str) -> None:
    """The missing requirement of an attack, a kernel version or a number of cores, is named."""
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert suite.find_missing_requirement(next(probe for probe in PROBES if probe.name == "more_cores")) == lacks


def test_the_table_tells_a_breach_and_a_control_that_failed() -> None:
    """The result table marks a breach and a failed control. A suite that could not fail would prove
    nothing."""
    held, through = AttackOutcome(succeeded=False, stopped_by="PermissionError"), AttackOutcome(succeeded=True, stopped_by="")
    rows = {
        name: AttackResult(PROBES[0], *pair)
        for name, pair in {"good": (held, through), "breach": (through, through), "void": (held, held)}.items()
    }
    assert {name: row.has_passed for name, row in rows.items()} == {"good": True, "breach": False, "void": False}
    assert not AttackResult(PROBES[0], AttackOutcome(succeeded=False, stopped_by="", host_fault=True), through).has_passed
    rows["not shown"] = AttackResult(PROBES[0], held, None, "needs Linux 9.9")
    assert rows["not shown"].has_passed
    assert suite.format_summary(list(rows.values())).splitlines()[-1] == "| host files | 4 | 3 | 2 | `read_file` needs Linux 9.9 |"
    lines = format_table(list(rows.values())).splitlines()[2:]
    assert ["BREACHED" in line for line in lines] == [False, True, False, False]
    assert ["FAILED" in line for line in lines] == [False, False, True, False]
