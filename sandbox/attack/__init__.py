"""Attacks on the sandbox, each with a control: `python -m sandbox attack`.

The control runs without the layers that the attack targets and shows that the attack then succeeds.
"""

from sandbox.attack import blame, calls, crosstalk, files, hoards, network, privileges, processes, resources
from sandbox.attack.probe import AttackProbe

PROBES: tuple[AttackProbe, ...] = (
    *files.PROBES, *network.PROBES, *processes.PROBES, *privileges.PROBES, *resources.PROBES,
    *hoards.PROBES, *crosstalk.PROBES, *calls.PROBES, *blame.PROBES,
)  # fmt: skip
