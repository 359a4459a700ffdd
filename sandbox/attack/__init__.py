"""Attacks on the sandbox, each with a control; `python -m megatron_rl_sandbox attack` runs them.

A control is a run of the same attack without the layers that should stop it. The control shows that
the attack succeeds if these layers are missing.
"""

from megatron_rl_sandbox.attack import (
    crosstalk_attacks,
    diagnosis_attacks,
    file_attacks,
    memory_attacks,
    privilege_attacks,
    process_attacks,
    resource_attacks,
    socket_attacks,
    syscall_attacks,
)
from megatron_rl_sandbox.attack.attack_probe import AttackProbe

PROBES: tuple[AttackProbe, ...] = (
    *file_attacks.PROBES, *socket_attacks.PROBES, *process_attacks.PROBES, *privilege_attacks.PROBES, *resource_attacks.PROBES,
    *memory_attacks.PROBES, *crosstalk_attacks.PROBES, *syscall_attacks.PROBES, *diagnosis_attacks.PROBES,
)  # fmt: skip
