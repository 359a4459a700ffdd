"""What this host offers a sandbox, as a table, and whether it makes a room."""

import os
import platform

from sandbox.layers import NAMES, choose, offered
from sandbox.types import SandboxFault

MEANING = {
    "user_ns": "namespaces without root",
    "mount_ns": "a mount table of its own",
    "read_only_root": "interpreter, packages and /usr read-only; nothing else of the host",
    "private_tmp": "working directory and /tmp in a bounded tmpfs, inputs read-only",
    "net_ns": "no network",
    "pid_ns": "sees and signals only itself; dies as one",
    "ipc_ns": "no System V or POSIX queues of the host, no host name",
    "cgroup": "memory, processes and cores of a whole box",
    "watchdog": "the same by looking every 0.1 s, where there is no cgroup",
    "rlimits": "memory, files, processor time of each process",
    "drop_uid": "a user id that owns nothing",
    "capabilities": "no privilege, and none by exec",
    "landlock": "no file beyond the list, whatever the mounts say",
    "seccomp": "system calls by allow-list",
}


def report() -> tuple[str, bool]:
    """The table, and whether `isolation="auto"` will run here."""
    offers = offered()
    try:
        taken, verdict = choose(offers).names(), "isolation: available"
    except SandboxFault as fault:
        taken, verdict = [], str(fault)
    lines = [f"host: Linux {platform.release()} {platform.machine()}, uid {os.geteuid()}, {os.cpu_count()} cores", ""]
    for name in NAMES:
        state = "in use" if name in taken else "spare" if offers[name] is None else "missing"
        lines.append(f"{name:<15} {state:<8} {MEANING[name]}" + (f" [{offers[name]}]" if offers[name] else ""))
    return "\n".join([*lines, "", verdict]), bool(taken)
