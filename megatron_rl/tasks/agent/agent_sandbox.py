"""Runs the command of an agent in the sandbox (sandbox/command.py).

The command sees a copy of its folder, the paths that the settings name, the system's programs and
the Python environment of the run. It reaches the run's endpoint and no other address. It inherits
no environment variable of the run.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from megatron_rl.config import require
from megatron_rl.errors import InfraError
from megatron_rl_sandbox import SandboxError
from megatron_rl_sandbox.command import CommandSettings, make_command_line
from megatron_rl_sandbox.layers import SOURCE_DIR, Layers, choose_layers, detect_layers
from megatron_rl_sandbox.mounts import find_exposing_path

KEY = "task.options.sandbox_paths"
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(slots=True, frozen=True)
class AgentSandbox:
    """Sandbox for the commands of a task."""

    layers: Layers
    readable: tuple[str, ...]
    """Paths of the host that the command can read."""

    def wrap(self, command: Sequence[str], variables: Mapping[str, str], *, base_url: str) -> tuple[list[str], dict[str, str]]:
        """Return the command line that runs `command` in the sandbox, and its whole environment.

        `variables` are those of the agent, and `base_url` is the endpoint.
        """
        address = urlsplit(base_url)
        assert address.hostname is not None and address.port is not None
        path = os.pathsep.join([os.path.join(sys.prefix, "bin"), *PROGRAM_FOLDERS])
        environment = {**variables, "PATH": path, "LANG": "C.UTF-8"}
        settings = CommandSettings(
            layers=self.layers, readable=self.readable, host=address.hostname, port=address.port, variables=tuple(environment)
        )
        return make_command_line(settings, command), {**environment, "PYTHONPATH": SOURCE_DIR}


def open_sandbox(paths: Sequence[str]) -> AgentSandbox:
    """Return a sandbox with all layers that this host offers.

    Raises:
        InfraError: The host lacks a required layer.
    """
    try:
        layers = choose_layers(detect_layers())
    except SandboxError as fault:
        remedy = "find the cause with `python -m megatron_rl_sandbox doctor`"
        raise InfraError(f"task.options.sandbox=True: {fault}; {remedy}") from fault
    return AgentSandbox(replace(layers, cgroup=False, watchdog=False), tuple(paths))


def resolve_program(program: str) -> str:
    """Return the path of a program with the links of its folder resolved, as in the sandbox."""
    folder, name = os.path.split(os.path.abspath(program))
    return os.path.join(os.path.realpath(folder), name)


def check_paths(command: Sequence[str], paths: Sequence[str], *, hidden: Sequence[str]) -> None:
    """Raise ValueError unless the sandbox shows the files of the command, and no hidden file.

    Args:
        command: Command; its absolute paths must be visible.
        paths: Paths that are visible in addition to the system's.
        hidden: Files that must not be visible, such as the data with the reference answers.
    """
    for argument in command:
        if os.path.isabs(argument) and os.path.exists(argument):
            remedy = f"is not visible in the sandbox; add it to {KEY}=[{argument}]"
            require(find_exposing_path(argument, paths) is not None, "task.options.command", argument, remedy)
    for file in hidden:
        shown = find_exposing_path(file, paths)
        require(shown is None, KEY, list(paths), f"{file} is below {shown}, which the agent can read; move it, or name other paths")
