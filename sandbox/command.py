"""Runs a command in the isolation layers, with one TCP address of the host and nothing else of it.

usage: python -P -m megatron_rl_sandbox.command SETTINGS COMMAND ...

The files in the current directory become the command's working directory, read-only, in a file
system of its own (mounts.py). SETTINGS is JSON (`CommandSettings.to_json`). The exit code is the
command's exit code, or 1 if the host refuses a layer.

    relay       host's namespaces: accepts connections at the address inside, and connects outside
      holder    own mount table and root; waits for the next process
        init    process 1 of its namespaces: enters the layers of a box, then waits for the command
          command

The listening socket is created inside and sent to the relay, so the network namespace needs no
other connection to the host. If a process of this chain dies, the kernel kills those below.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fcntl import ioctl
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron_rl_sandbox import confine, kernel, mounts
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.records import BoxLimits

WORK_DIR = f"{mounts.BOX_DIR}/work"
"""Working directory of the command."""
LIMITS = BoxLimits(
    cpu_s=86_400, memory=8 << 30, processes=256, open_files=1024, disk=256 << 20, inodes=1 << 15, file=256 << 20
)  # fmt: skip
"""Limits of a command. `memory` limits each process by itself, and there is no limit on cores."""
MAX_CONNECTIONS = 64
_CHUNK_BYTES = 64 << 10
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_REPORT = b"listening"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """Settings of one command."""

    layers: Layers
    readable: tuple[str, ...] = ()
    """Files and folders of the host that the command can read and execute."""
    host: str
    port: int
    """Address that the command can connect to. It is the same inside and outside."""
    variables: tuple[str, ...] = ()
    """Environment variables of this process that the command inherits; it inherits no others."""

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))


def make_command_line(settings: CommandSettings, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` isolated. It needs PYTHONPATH=SOURCE_DIR."""
    return [sys.executable, "-P", "-m", "megatron_rl_sandbox.command", settings.to_json(), *command]


def run_command(settings: CommandSettings, command: Sequence[str]) -> int:
    """Run a command isolated in new child processes; return its exit code."""
    inputs = {path.name: path.read_bytes() for path in Path.cwd().iterdir()}
    environment = {name: os.environ[name] for name in settings.variables if name in os.environ}
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    holder = os.fork()
    if holder == 0:
        ours.close()
        _exit_with(lambda: _hold(settings, command, inputs, environment=environment, proc=proc, channel=theirs))
    theirs.close()
    os.close(proc)
    _, descriptors, _, _ = socket.recv_fds(ours, len(_REPORT), 1)
    if descriptors:
        asyncio.run(_relay_until_exit(socket.socket(fileno=descriptors[0]), (settings.host, settings.port), holder))
    return _wait_for(holder)


def _exit_with(run: Callable[[], int]) -> NoReturn:
    """Call `run` in a forked process, and exit with its result."""
    code = 1
    try:
        code = run()
    except OSError as error:
        print(f"the sandbox cannot run the command: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _wait_for(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _hold(
    settings: CommandSettings, command: Sequence[str], inputs: Mapping[str, bytes], *, environment: Mapping[str, str], proc: int,
    channel: socket.socket,
) -> int:  # fmt: skip
    """Enter the layers around the first process, start it, and return its exit code."""
    uid = confine.box_uid(os.getpid(), 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    confine.enter_zygote_layers(settings.layers, proc=proc, readable=settings.readable)
    kernel.unshare(kernel.CLONE_NEWPID)
    first = os.fork()
    if first == 0:
        _exit_with(lambda: _init(settings, command, inputs, environment=environment, proc=proc, channel=channel, uid=uid))
    channel.close()
    return _wait_for(first)


def _init(
    settings: CommandSettings, command: Sequence[str], inputs: Mapping[str, bytes], *, environment: Mapping[str, str], proc: int,
    channel: socket.socket, uid: int,
) -> int:  # fmt: skip
    """Enter the layers of a box, run the command, and return its exit code.

    All other processes of the namespace are killed when this one exits.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    confine.enter_box_namespaces(settings.layers, proc=proc)
    _raise_loopback()
    with socket.create_server((settings.host, settings.port), backlog=MAX_CONNECTIONS) as listener:
        socket.send_fds(channel, [_REPORT], [listener.fileno()])
    confinement = confine.Confinement(
        layers=settings.layers, limits=LIMITS, directory=mounts.BOX_DIR, uid=uid, base_data_bytes=0, base_address_bytes=0,
        cores=frozenset(os.sched_getaffinity(0)), readable=settings.readable, has_sockets=True,
    )  # fmt: skip
    confine.prepare_directory(confinement, inputs)
    confine.drop_privileges(confinement)
    kernel.close_from(3)
    child = os.fork()
    if child == 0:
        _exit_with(partial(_execute, command, {**environment, "HOME": WORK_DIR, "TMPDIR": f"{mounts.BOX_DIR}/tmp"}))
    while True:
        pid, status = os.wait()  # adopts and reaps orphans
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> int:
    os.execve(command[0], list(command), dict(environment))


def _raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace, which has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", ioctl(control, _SIOCGIFFLAGS, request))
        ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


async def _relay_until_exit(listener: socket.socket, address: tuple[str, int], pid: int) -> None:
    """Relay connections until the process exits; `listener` belongs to its network namespace."""
    exited = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(descriptor, exited.set)
    connections: set[asyncio.StreamWriter] = set()
    async with await asyncio.start_server(partial(_relay, address, connections), sock=listener, limit=_CHUNK_BYTES):
        await exited.wait()
        asyncio.get_running_loop().remove_reader(descriptor)
        for writer in connections:
            writer.transport.abort()
    os.close(descriptor)


async def _relay(
    address: tuple[str, int], connections: set[asyncio.StreamWriter], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:  # fmt: skip
    """Connect to the address and copy bytes in both directions until both sides have ended."""
    if len(connections) >= 2 * MAX_CONNECTIONS:
        writer.transport.abort()
        return
    with contextlib.suppress(OSError):
        outer_reader, outer_writer = await asyncio.open_connection(*address, limit=_CHUNK_BYTES)
        connections |= {writer, outer_writer}
        try:
            await asyncio.gather(_copy(reader, outer_writer), _copy(outer_reader, writer))
        finally:
            connections -= {writer, outer_writer}
            outer_writer.transport.abort()
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


def main() -> int:
    """Run the command of the command line."""
    given = json.loads(sys.argv[1])
    settings = CommandSettings(
        **{**given, "layers": Layers(**given["layers"]), "readable": tuple(given["readable"]), "variables": tuple(given["variables"])}
    )
    return run_command(settings, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
