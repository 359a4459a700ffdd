"""All attacks on the pool that this host gives, each with its control; the table; whether all were held and all controls got through."""

import asyncio
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from sandbox.attack import PROBES
from sandbox.attack.attempt import ATTACK_LIMITS, AttackOutcome, lift_layers, run_attack
from sandbox.attack.probe import AttackProbe
from sandbox.attack.witness import AttackOracle
from sandbox.layers import Layers
from sandbox.pool import SandboxPool
from sandbox.probe import is_privileged

MAX_PARALLEL_CONTROLS = 2


@dataclass(frozen=True)
class AttackResult:
    probe: AttackProbe
    defended: AttackOutcome
    control: AttackOutcome | None
    """None where it cannot be done even without any layer, because of what `lack` says."""
    missing_requirement: str = ""

    @property
    def has_passed(self) -> bool:
        return not self.defended.succeeded and not self.defended.host_fault and (self.control is None or self.control.succeeded)


async def run_suite(probes: Sequence[AttackProbe] = PROBES) -> list[AttackResult]:
    """The attacks one after the other on one pool, as strangers would share it; then the controls, two at a time."""
    with AttackOracle(ATTACK_LIMITS) as witness:
        async with SandboxPool(size=2, limits=ATTACK_LIMITS) as pool:
            layers = pool.layers
            defended = [await run_attack(probe, pool=pool, oracle=witness) for probe in probes]
    places, alone = asyncio.Semaphore(MAX_PARALLEL_CONTROLS), asyncio.Lock()

    async def row(probe: AttackProbe, held: AttackOutcome) -> AttackResult:
        if lack := find_missing_requirement(probe):
            return AttackResult(probe, held, None, lack)
        async with AsyncExitStack() as leave:
            if probe.min_cores > 1:  # it counts cores: nobody else may use them
                await leave.enter_async_context(alone)
            for _ in range(MAX_PARALLEL_CONTROLS if probe.min_cores > 1 else 1):
                await leave.enter_async_context(places)
            return AttackResult(probe, held, await _run_control_process(probe, lift_layers(layers, probe.lifted_layers)))

    return await asyncio.gather(*[row(probe, held) for probe, held in zip(probes, defended, strict=True)])


def find_missing_requirement(probe: AttackProbe) -> str:
    """Why this host cannot show that the attack works without its layers; empty where it can."""
    if probe.needs_root and not is_privileged():
        return "needs root"
    if probe.min_cores > (cores := len(os.sched_getaffinity(0))):
        return f"needs {probe.min_cores} cores, here is {cores}"
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))  # 6.18-rc3 has two numbers in front too
    return "" if release >= probe.min_kernel else "needs Linux {}.{}".format(*probe.min_kernel)


async def _run_control_process(probe: AttackProbe, layers: Layers) -> AttackOutcome:
    command = (sys.executable, "-m", "sandbox.attack.attempt", probe.name, ",".join(layers.enabled_names()))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    output, trouble = await child.communicate()
    if child.returncode != 0 or not output:
        last = trouble.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return AttackOutcome(succeeded=False, stopped_by=last[0][:200], host_fault=True)
    return AttackOutcome(**json.loads(output.splitlines()[-1]))


def format_table(rows: Sequence[AttackResult]) -> str:
    """GitHub's Markdown, a line a probe, the classes in order."""
    lines = ["| class | probe | what it does | with all layers | control |", "|---|---|---|---|---|"]
    for row in rows:
        verdict = "BREACHED" if row.defended.succeeded else "HOST FAULT" if row.defended.host_fault else "held"
        control = (
            row.missing_requirement
            if row.control is None
            else "gets through"
            if row.control.succeeded
            else f"FAILED: {row.control.stopped_by}"
        )
        met = row.defended.stopped_by.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.probe.group} | `{row.probe.name}` | {row.probe.aim} | {verdict}: {met} | {control} |")
    return "\n".join(lines)


def format_summary(rows: Sequence[AttackResult]) -> str:
    """A line a class: what this host holds, and for how many of its probes a control showed that they work."""
    lines = ["| class | probes | held | controls through | not to be shown here |", "|---|---|---|---|---|"]
    for group in dict.fromkeys(row.probe.group for row in rows):
        own = [row for row in rows if row.probe.group == group]
        held = sum(not row.defended.succeeded and not row.defended.host_fault for row in own)
        through = sum(row.control is not None and row.control.succeeded for row in own)
        lacking = ", ".join(f"`{row.probe.name}` {row.missing_requirement}" for row in own if row.control is None)
        lines.append(f"| {group} | {len(own)} | {held} | {through} | {lacking} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Print the table; 0 if every attack was held and every control got through, 1 otherwise."""
    unknown = set(names) - {probe.name for probe in PROBES} - {probe.group for probe in PROBES}
    if unknown:
        print(f"no probe and no class is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [probe for probe in PROBES if not names or probe.name in names or probe.group in names]
    rows = asyncio.run(run_suite(chosen))
    print(format_table(rows))
    breaches = sum(row.defended.succeeded for row in rows)
    skipped = sum(row.control is None for row in rows)
    failed = sum(row.control is not None and not row.control.succeeded for row in rows)
    print(f"\n{format_summary(rows)}\n")
    print(f"{len(rows)} probes: {breaches} breached, {failed} controls failed, {skipped} controls cannot be shown here")
    return 0 if all(row.has_passed for row in rows) else 1
