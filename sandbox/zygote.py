"""Zygote: single-threaded process with preloaded libraries that forks and reaps boxes.

The process runs inside the zygote's layers (confine.py). The pool starts the process with the
command `python -m megatron_rl_sandbox.zygote SETTINGS` and a control socket (SOCK_SEQPACKET, JSON
datagrams) as descriptor 0.

    pool -> zygote   {"spawn": id, "slot": n, "directory": path} + three descriptors (channel,
                     stdout, stderr);   {"kill": id}
    zygote -> pool   {"ready": bytes of anonymous memory in the zygote} or {"host": reason};
                     {"spawned": id, "pid": pid} or {"failed": id, "reason"};
                     {"exited": id, "status", "cpu_s", "limited"}

When the control socket closes, the zygote kills all boxes, waits for them and exits. When the
thread that started the zygote ends, the kernel kills the zygote.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_rl_sandbox import confine, kernel, worker
from megatron_rl_sandbox.frames import MAX_CONTROL_BYTES
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.records import BoxLimits

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
THREAD_WAIT_S, THREAD_CHECKS = 2.0, 200


@dataclass(slots=True)
class BoxProcess:
    """First process of a box; this process is a child of the zygote."""

    id: int
    pid: int
    pidfd: int
    """File descriptor that refers to the process (pidfd_open(2))."""


class Zygote:
    """Serves the pool's requests on the control socket."""

    def __init__(self, control: socket.socket, *, layers: Layers, limits: BoxLimits) -> None:
        self.control, self.layers, self.limits = control, layers, limits
        self.children: dict[int, BoxProcess] = {}
        self.selector = selectors.DefaultSelector()
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self.own_pid_ns = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self.pid = os.getpid()
        memory = [int(field) * PAGE_BYTES for field in Path("/proc/self/statm").read_text().split()]
        self.address_bytes, self.anonymous_bytes, self.data_bytes = memory[0], memory[1] - memory[2], memory[5]

    def serve(self) -> None:
        """Serve requests until the pool closes the control socket."""
        self.selector.register(self.control, selectors.EVENT_READ)
        self.send({"ready": self.anonymous_bytes})
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    self.reap_child(key.data)
                elif not self.handle_request():
                    self.kill_children()
                    return

    def handle_request(self) -> bool:
        """Handle one request from the pool. Return False if the pool has closed the socket."""
        text, descriptors, _, _ = socket.recv_fds(self.control, MAX_CONTROL_BYTES, 3)
        if not text:
            return False
        request = json.loads(text)
        if "kill" in request:
            child = self.children.get(request["kill"])
            if child is not None:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            return True
        try:
            pid = self.fork_box(request, descriptors)
        except OSError as error:
            self.send({"failed": request["spawn"], "reason": str(error)})
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        child = BoxProcess(id=request["spawn"], pid=pid, pidfd=os.pidfd_open(pid))
        self.children[child.id] = child
        self.selector.register(child.pidfd, selectors.EVENT_READ, child)
        self.send({"spawned": child.id, "pid": pid})
        return True

    def fork_box(self, request: dict[str, object], descriptors: list[int]) -> int:
        """Fork the first process of a box and return its pid.

        With `pid_ns`, the process is PID 1 of a new PID namespace. When PID 1 dies, the kernel
        kills all other processes in the namespace.

        The zygote calls unshare(CLONE_NEWPID) before the fork. After the fork, the zygote returns
        to its original PID namespace with setns(2), because its next unshare(CLONE_NEWPID) would
        otherwise fail. In a user namespace, the zygote lacks the privileges for this setns(2), so a
        helper process forks the box.
        """
        if self.layers.pid_ns and self.layers.user_ns:
            return self.fork_box_via_helper(request, descriptors)
        if self.layers.pid_ns:
            kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                self.run_as_box(request, descriptors)
        finally:
            if self.layers.pid_ns:
                kernel.setns(self.own_pid_ns, kernel.CLONE_NEWPID)
        return pid

    def fork_box_via_helper(self, request: dict[str, object], descriptors: list[int]) -> int:
        """Fork a box through a helper process.

        The helper exits, and the zygote adopts the helper's child, because the zygote is a
        subreaper. Opening a box takes twice as long as with a direct fork.
        """
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                kernel.unshare(kernel.CLONE_NEWPID)
                pid = os.fork()
                if pid == 0:
                    self.run_as_box(request, descriptors)
                os.write(writing, str(pid).encode())
            except OSError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(between, 0)
        with os.fdopen(reading) as answer:
            text = answer.read()
        if not text.isdecimal():
            raise OSError(text or "the process that forks a box died")
        return int(text)

    def run_as_box(self, request: dict[str, object], descriptors: list[int]) -> None:
        """Run a box in this process, then exit the process."""
        status = 1
        try:
            os.setsid()
            if not self.layers.pid_ns:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            worker.close_other_fds([*descriptors, self.proc])
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            channel = socket.socket(fileno=descriptors[0])
            room = confine.Confinement(
                layers=self.layers,
                limits=self.limits,
                directory=str(request["directory"]),
                uid=confine.box_uid(self.pid, int(request["slot"])),
                base_data_bytes=self.data_bytes,
                base_address_bytes=self.address_bytes,
                cores=confine.box_cores(self.pid + int(request["slot"]), cpus=self.limits.cpus),
            )
            worker.run_box(channel, confinement=room, proc=self.proc, output_fds=(descriptors[1], descriptors[2]))
            status = 0
        finally:
            os._exit(status)

    def reap_child(self, child: BoxProcess) -> None:
        """Reap an exited box and report it to the pool."""
        limited = self.has_lowered_cpu_limit(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self.children[child.id]
        self.send({"exited": child.id, "status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "limited": limited})

    def has_lowered_cpu_limit(self, pid: int) -> bool:
        """Return True if the code lowered its RLIMIT_CPU.

        The kernel kills a process that exceeds RLIMIT_CPU. The limits of a dead process stay
        readable in /proc until the process is waited for.
        """
        if not self.layers.rlimits:
            return False
        try:
            descriptor = os.open(f"{pid}/limits", os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return False
        with os.fdopen(descriptor) as limits:
            hard = next(line.split()[4] for line in limits if line.startswith("Max cpu time"))
        return hard != "unlimited" and int(hard) < self.limits.cpu_s + 1

    def kill_children(self) -> None:
        """Kill all boxes and wait for them."""
        for child in self.children.values():
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in self.children.values():
            os.waitpid(child.pid, 0)

    def send(self, message: dict[str, object]) -> None:
        """Send a message to the pool."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool is gone; the next read of the socket notices
            self.control.send(json.dumps(message).encode())


def list_other_threads() -> list[str]:
    """Return the names of all threads of this process except the current thread.

    The function waits up to THREAD_WAIT_S seconds for threads that are about to end, such as
    Matplotlib's timer.
    """
    own, tasks = str(os.getpid()), Path("/proc/self/task")
    for _ in range(THREAD_CHECKS):
        others = [task for task in tasks.iterdir() if task.name != own]
        if not others:
            return []
        time.sleep(THREAD_WAIT_S / THREAD_CHECKS)
    return [(task / "comm").read_text().strip() for task in others]


def main(settings: str) -> None:
    """Load the libraries, enter the zygote's layers and serve the pool."""
    chosen = json.loads(settings)
    layers = Layers(**chosen["layers"])
    limits = BoxLimits(**{item.name: chosen["limits"][item.name] for item in fields(BoxLimits)})
    control = socket.socket(fileno=os.dup(0))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    sys.path[:] = [path for path in sys.path if path != chosen["source"]]
    worker.preload_libraries()
    zygote = Zygote(control, layers=layers, limits=limits)
    if others := list_other_threads():
        zygote.send({"host": f"a loaded library runs a thread ({', '.join(others)}), which forked processes would lack"})
        return
    try:
        confine.enter_zygote_layers(layers, proc=zygote.proc)
    except OSError as error:
        zygote.send({"host": str(error)})
        return
    # Needed because a stopped process does not notice that its socket closed. The call comes last,
    # because entering namespaces clears this setting.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.collect()
    gc.freeze()
    zygote.serve()


if __name__ == "__main__":
    main(sys.argv[1])
