"""Attack suite that runs all attacks and their controls on this host and prints a report."""

import asyncio
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from megatron_rl_sandbox.attack import PROBES
from megatron_rl_sandbox.attack.attack_oracle import AttackOracle
from megatron_rl_sandbox.attack.attack_probe import AttackProbe
from megatron_rl_sandbox.attack.attack_run import ATTACK_LIMITS, AttackOutcome, lift_layers, run_attack
from megatron_rl_sandbox.layer_probe import is_privileged
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.pool import SandboxPool

MAX_PARALLEL_CONTROLS = 2


@dataclass(frozen=True)
class AttackResult:
    """Outcome of one attack with all layers, and the outcome of its control."""

    probe: AttackProbe
    defended: AttackOutcome
    control: AttackOutcome | None
    """Outcome of the control; None if the host does not meet a requirement of the attack."""
    missing_requirement: str = ""

    @property
    def has_passed(self) -> bool:
        """True if the attack failed without a host fault, and its control did not fail."""
        return not self.defended.succeeded and not self.defended.host_fault and (self.control is None or self.control.succeeded)


async def run_suite(probes: Sequence[AttackProbe] = PROBES) -> list[AttackResult]:
    """Run all attacks one after the other on one shared pool, then their controls.

    Up to MAX_PARALLEL_CONTROLS controls run at the same time.
    """
    defended, layers = await run_attacks(probes)
    places, alone = asyncio.Semaphore(MAX_PARALLEL_CONTROLS), asyncio.Lock()

    async def row(probe: AttackProbe, held: AttackOutcome) -> AttackResult:
        if lack := find_missing_requirement(probe):
            return AttackResult(probe, held, None, lack)
        async with AsyncExitStack() as leave:
            if probe.min_cores > 1:  # the attack measures core usage, so its control must run alone
                await leave.enter_async_context(alone)
            for _ in range(MAX_PARALLEL_CONTROLS if probe.min_cores > 1 else 1):
                await leave.enter_async_context(places)
            return AttackResult(probe, held, await _run_control_process(probe, lift_layers(layers, probe.lifted_layers)))

    return await asyncio.gather(*[row(probe, held) for probe, held in zip(probes, defended, strict=True)])


async def run_attacks(probes: Sequence[AttackProbe]) -> tuple[list[AttackOutcome], Layers]:
    """Run attacks one after the other on one shared pool.

    Return their outcomes and the layers of the pool.
    """
    with AttackOracle(ATTACK_LIMITS) as witness:
        async with SandboxPool(size=2, limits=ATTACK_LIMITS) as pool:
            return [await run_attack(probe, pool=pool, oracle=witness) for probe in probes], pool.layers


def find_missing_requirement(probe: AttackProbe) -> str:
    """Return the attack's first requirement that this host does not meet, or an empty string."""
    if probe.needs_root and not is_privileged():
        return "needs root"
    if probe.min_cores > (cores := len(os.sched_getaffinity(0))):
        return f"needs {probe.min_cores} cores, this host has {cores}"
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))  # for example (6, 18) for "6.18-rc3"
    return "" if release >= probe.min_kernel else "needs Linux {}.{}".format(*probe.min_kernel)


async def _run_control_process(probe: AttackProbe, layers: Layers) -> AttackOutcome:
    command = (sys.executable, "-m", "megatron_rl_sandbox.attack.attack_run", probe.name, ",".join(layers.enabled_names()))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    output, trouble = await child.communicate()
    if child.returncode != 0 or not output:
        last = trouble.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return AttackOutcome(succeeded=False, stopped_by=last[0][:200], host_fault=True)
    return AttackOutcome(**json.loads(output.splitlines()[-1]))


def format_table(rows: Sequence[AttackResult]) -> str:
    """Format the results as a Markdown table with one row per probe."""
    lines = ["| class | probe | what it does | with all layers | control |", "|---|---|---|---|---|"]
    for row in rows:
        verdict = "BREACHED" if row.defended.succeeded else "HOST FAULT" if row.defended.host_fault else "held"
        control = (
            row.missing_requirement
            if row.control is None
            else "attack succeeds"
            if row.control.succeeded
            else f"FAILED: {row.control.stopped_by}"
        )
        met = row.defended.stopped_by.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.probe.group} | `{row.probe.name}` | {row.probe.aim} | {verdict}: {met} | {control} |")
    return "\n".join(lines)


def format_summary(rows: Sequence[AttackResult]) -> str:
    """Format the results as a Markdown table with one row per class of attacks.

    The columns are the number of attacks, the number of attacks that this host stopped, the number
    of controls that succeeded, and the controls that cannot succeed on this host.
    """
    lines = ["| class | probes | held | controls succeeded | not testable here |", "|---|---|---|---|---|"]
    for group in dict.fromkeys(row.probe.group for row in rows):
        own = [row for row in rows if row.probe.group == group]
        held = sum(not row.defended.succeeded and not row.defended.host_fault for row in own)
        through = sum(row.control is not None and row.control.succeeded for row in own)
        lacking = ", ".join(f"`{row.probe.name}` {row.missing_requirement}" for row in own if row.control is None)
        lines.append(f"| {group} | {len(own)} | {held} | {through} | {lacking} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Run the chosen probes, print the tables and return the exit status.

    Args:
        names: Names of probes or probe classes. If empty, all probes run.

    Returns:
        2 if a name is unknown. Otherwise, 0 if every attack was stopped and every control that can
        succeed on this host succeeded, else 1.
    """
    unknown = set(names) - {probe.name for probe in PROBES} - {probe.group for probe in PROBES}
    if unknown:
        print(f"no probe or class is named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [probe for probe in PROBES if not names or probe.name in names or probe.group in names]
    rows = asyncio.run(run_suite(chosen))
    print(format_table(rows))
    breaches = sum(row.defended.succeeded for row in rows)
    skipped = sum(row.control is None for row in rows)
    failed = sum(row.control is not None and not row.control.succeeded for row in rows)
    print(f"\n{format_summary(rows)}\n")
    print(f"{len(rows)} probes: {breaches} attacks succeeded, {failed} controls failed, {skipped} controls skipped on this host")
    return 0 if all(row.has_passed for row in rows) else 1
