"""Attacks on the sandbox, each with a control that shows that it would succeed without what it attacks: `python -m sandbox attack`."""

from sandbox.attack import blame, calls, crosstalk, files, hoards, network, privileges, processes, resources
from sandbox.attack.probe import AttackProbe

PROBES: tuple[AttackProbe, ...] = (
    *files.PROBES, *network.PROBES, *processes.PROBES, *privileges.PROBES, *resources.PROBES,
    *hoards.PROBES, *crosstalk.PROBES, *calls.PROBES, *blame.PROBES,
)  # fmt: skip
