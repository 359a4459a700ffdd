"""Report on the isolation layers and protections that this host provides."""

import os
import platform
from collections.abc import Collection

from megatron_rl_sandbox import mounts
from megatron_rl_sandbox.layers import LAYER_NAMES, PROTECTIONS, SOURCE_DIR, Layers, choose_layers, detect_layers
from megatron_rl_sandbox.records import SandboxError

LAYER_DESCRIPTIONS = {
    "user_ns": "namespaces without root",
    "mount_ns": "separate mount table",
    "read_only_root": "interpreter, packages and /usr read-only; nothing else of the host",
    "private_tmp": "working directory and /tmp in a bounded tmpfs, inputs read-only",
    "net_ns": "no network",
    "pid_ns": "sees and signals only its own processes; killed as a whole",
    "ipc_ns": "no System V or POSIX queues of the host; the host name is box",
    "cgroup": "memory, processes and cores of a whole box",
    "watchdog": "memory and processes measured every 0.1 s, cores by affinity; used if there is no cgroup",
    "rlimits": "memory, files, processor time of each process",
    "drop_uid": "a user id that owns nothing",
    "capabilities": "no privileges, and none gained by exec",
    "landlock": "no file outside the allow-list, independent of the mounts",
    "seccomp": "system calls by allow-list",
}


def make_report(*, allow_missing: Collection[str] = ()) -> tuple[str, bool]:
    """Return (report, can_start) for this host.

    `can_start` is True if a pool with isolation="auto" can start on this host.
    `allow_missing` names protections that this host may lack (see `SandboxPool`).
    """
    offers = detect_layers()
    layers, verdict, able = Layers(), "isolation: available", True
    try:
        layers = choose_layers(offers)
        choose_layers(offers, allow_missing=allow_missing)
    except SandboxError as fault:
        verdict, able = str(fault), False
    lines = [f"host: Linux {platform.release()} {platform.machine()}, uid {os.geteuid()}, {os.cpu_count()} cores", ""]
    for name in LAYER_NAMES:
        state = "in use" if name in layers.enabled_names() else "spare" if offers[name] is None else "missing"
        lines.append(f"{name:<15} {state:<8} {LAYER_DESCRIPTIONS[name]}" + (f" [{offers[name]}]" if offers[name] else ""))
    return "\n".join([*lines, "", *describe_protections(layers), "", *warn_exposed_paths({"the source": SOURCE_DIR}), verdict]), able


def describe_protections(layers: Layers) -> list[str]:
    """Return one line for each protection.

    The line contains `held` and the layers that enforce the protection, or `OPEN` if there are
    none.
    """
    lines = []
    for name, wall in PROTECTIONS.items():
        held = wall.find_enforcing_layers(layers)
        by = f" [{', '.join(sorted(held))}]" if held else ""
        lines.append(f"{name:<15} {'held' if held else 'OPEN':<8} code {'never ' if held else ''}{wall.violation}{by}")
    return lines


def warn_exposed_paths(paths: dict[str, str]) -> list[str]:
    """Return a warning for each path that code in a box can read.

    `paths` contains the paths to check, keyed by a description of each path, such as "the source".
    Boxes can read everything below the system paths that they need (`mounts.system_paths`).
    """
    return [
        f"warning: {what} ({path}) is below {shown}, which code in every box can read: move it"
        for what, path in paths.items()
        if (shown := mounts.find_exposing_path(path)) is not None
    ]
