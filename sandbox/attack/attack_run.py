"""Runs an attack on a pool. As a command, this module runs the control of an attack.

The control is the same attack with some layers disabled. The control runs in its own process,
inside the outer bounds (outer_bounds.py). The suite starts the process with this command, which
prints the outcome as a line of JSON:

python -m megatron_rl_sandbox.attack.attack_run PROBE LAYER,LAYER,...
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace

from PIL import Image

from megatron_rl_sandbox.attack import PROBES, outer_bounds
from megatron_rl_sandbox.attack.attack_oracle import AttackOracle
from megatron_rl_sandbox.attack.attack_probe import PRELUDE, AttackProbe, Evidence
from megatron_rl_sandbox.layers import LAYER_NAMES, Layers
from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import BoxLimits, CallResult, Fault

ATTACK_LIMITS = BoxLimits(call_timeout_s=2.0, open_timeout_s=120.0, memory=256 << 20, processes=16, disk=16 << 20, inodes=512, file=8 << 20)
CONTROL_TIMEOUT_S = 180.0
SETTLE_S = 0.3
"""Seconds between closing a box and checking for surviving processes."""


@dataclass(frozen=True)
class AttackOutcome:
    """Outcome of one run of an attack."""

    succeeded: bool
    stopped_by: str
    """Limit or error that stopped the code.

    If nothing stopped the code, this is the code's last output.
    """
    host_fault: bool = False


async def run_attack(probe: AttackProbe, *, pool: SandboxPool, oracle: AttackOracle) -> AttackOutcome:
    """Run the calls of a probe in a box of the pool, while a second box with a secret is open."""
    picture = Image.new("RGB", (64, 48), (200, 30, 30))
    before = oracle.snapshot_state()
    async with (
        await pool.open(files={"neighbour.txt": oracle.secret.encode()}),
        await pool.open(images={"image_0": picture}) as box,
    ):
        seconds = max(pool.limits.call_timeout_s, probe.raised_limits.get("call_timeout_s", 0) if probe.has_long_timeout else 0)
        sources = [oracle.build_source(PRELUDE + call, patience_s=seconds / 3) for call in probe.calls]
        results = [await box.run(source, timeout_s=seconds) for source in sources]
    if probe.evidence in (Evidence.SURVIVED, Evidence.REACHED, Evidence.CHANGED):
        await asyncio.sleep(SETTLE_S)
    succeeded = oracle.has_succeeded(probe, results, before)
    return AttackOutcome(
        succeeded=succeeded, stopped_by=_describe_outcome(results), host_fault=any(result.fault is Fault.HOST for result in results)
    )


def _describe_outcome(results: list[CallResult]) -> str:
    for result in results:
        if result.limit is not None:
            return f"limit: {result.limit}"
        if result.error is not None:
            return f"{result.error.type}: {result.error.message}"[:60]
        if result.dropped:
            return str(result.dropped[0])[:60]
    return (results[-1].text.strip() or "no output")[:60]


def lift_layers(layers: Layers, lifted_layers: frozenset[str]) -> Layers:
    """Return `layers` without `lifted_layers` and without the layers that require them."""
    if layers.user_ns and "user_ns" in lifted_layers:  # the other namespaces need the user namespace's privileges
        lifted_layers |= {name for name in LAYER_NAMES if name.endswith("_ns")}
    if "mount_ns" in lifted_layers:
        lifted_layers |= {"read_only_root", "private_tmp"}
    return replace(layers, **{name: False for name in lifted_layers & set(LAYER_NAMES)})


async def run_control(probe: AttackProbe, layers: Layers) -> AttackOutcome:
    """Run an attack in a new pool with the given layers, or in a plain child process."""
    with AttackOracle(ATTACK_LIMITS) as witness:
        if probe.uses_plain_child:
            return _run_plain_child(probe, witness)
        async with SandboxPool(size=2, limits=replace(ATTACK_LIMITS, **probe.raised_limits), layers=layers) as pool:
            return await run_attack(probe, pool=pool, oracle=witness)


def _run_plain_child(probe: AttackProbe, oracle: AttackOracle) -> AttackOutcome:
    """Run the code of a probe in a child process, as simple code runners do.

    The child inherits the environment and file descriptors of this process. On timeout, only
    the child's process group is killed.
    """
    command = [sys.executable, "-c", oracle.build_source(PRELUDE + probe.calls[0], patience_s=ATTACK_LIMITS.call_timeout_s / 3)]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, close_fds=False, stdout=output, stderr=output, start_new_session=True)
        try:
            child.wait(ATTACK_LIMITS.call_timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        time.sleep(SETTLE_S)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return AttackOutcome(succeeded=oracle.has_succeeded(probe, [CallResult(id=1, text=text)], {}), stopped_by=text[-60:])


def main() -> None:
    """Run the control of one probe inside the outer bounds and print the outcome of the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=[probe.name for probe in PROBES])
    parser.add_argument("layers", help="comma-separated names of the layers to keep")
    arguments = parser.parse_args()
    probe = next(probe for probe in PROBES if probe.name == arguments.probe)
    layers = Layers(**dict.fromkeys(filter(None, arguments.layers.split(",")), True))

    def work() -> None:
        print(json.dumps(asdict(asyncio.run(run_control(probe, layers)))))

    sys.exit(outer_bounds.run_bounded(work, timeout_s=CONTROL_TIMEOUT_S))


if __name__ == "__main__":
    main()
