"""Oracle that creates the attack suite's targets on the host and detects successful attacks.

The targets are secrets, files, listeners and a canary process. The oracle creates the files in a
new folder and opens the listeners on ports chosen by the kernel. The oracle also creates IPC
objects and a keyring key that contain secrets (ipc_secrets.py). At the end, the oracle removes all
targets. The attacks act only on the oracle's targets, so a successful attack harms nothing else on
the host.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import secrets
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

from megatron_rl_sandbox.attack import ipc_secrets
from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.records import BoxLimits, CallResult, Fault

CANARY = """
import ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # whoever may signal it may debug it, where Yama would forbid
heard = []
signal.signal(signal.SIGWINCH, lambda number, frame: heard.append(number))
secret = ctypes.create_string_buffer(os.environ["SANDBOX_ATTACK_SECRET"].encode(), 64)
scratch = ctypes.create_string_buffer(b"untouched", 64)
held = os.open(sys.argv[1], os.O_RDONLY)
print(json.dumps({"address": ctypes.addressof(secret), "scratch": ctypes.addressof(scratch), "canary_fd": held}), flush=True)
for line in sys.stdin:
    print(json.dumps([len(heard), scratch.value.decode()]), flush=True)
"""

F_OFD_SETLK = 37  # the lock belongs to the open file, not to the process


class AttackOracle:
    """Context manager that creates the targets of attacks and detects successful attacks.

    `build_source` passes `facts`, which describe the targets, to the code of a probe.
    `has_succeeded` compares the results of `snapshot_state` from before and after an attack.
    """

    def __init__(self, limits: BoxLimits) -> None:
        self.limits = limits
        self.marker = secrets.token_hex(8)
        self.secret = secrets.token_hex(16)
        self.received = b""
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._create_files(stack)
            self._create_locked_files(stack)
            self._start_canary(stack)
            self._start_listeners(stack)
            self.facts |= ipc_secrets.plant_secrets(stack, self.secret.encode())
            self.facts |= {
                "drow": self.marker[::-1],
                "mark": f"a-{self.marker[:10]}",
                "net_ns": os.stat("/proc/self/ns/net").st_ino,
                "many": 4 * self.limits.processes,
                "too_much": 2 * self.limits.memory,
                "too_full": 2 * self.limits.disk,
                "too_many_files": 2 * self.limits.inodes,
                "too_long_s": 2 * self.limits.call_timeout_s,
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _create_files(self, stack: contextlib.ExitStack) -> None:
        os.environ["SANDBOX_ATTACK_SECRET"] = self.secret
        stack.callback(os.environ.pop, "SANDBOX_ATTACK_SECRET")
        self.folder = Path(tempfile.mkdtemp(prefix="sandbox-attack-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, self.folder)
        self.folder.chmod(0o755)
        self.victims = {name: self.folder / name for name in ("secret_file", "private_file", "victim_file")}
        for name, mode in (("secret_file", 0o644), ("private_file", 0o600), ("victim_file", 0o666)):
            self.victims[name].write_text(self.secret)
            self.victims[name].chmod(mode)
        self.folder.chmod(0o777)  # a deletable file must be in a world-writable folder
        pixels = self.secret.encode() * 64
        image = self.folder / "secret.png"
        Image.frombytes("L", (64, len(pixels) // 64), pixels).save(image)
        self.victims["shm_file"] = Path("/dev/shm") / f"sandbox-attack-{self.marker}"
        stack.callback(self.victims["shm_file"].unlink, missing_ok=True)
        self.facts |= {name: str(path) for name, path in self.victims.items()} | {"secret_image": str(image)}
        inherited = os.open(self.victims["secret_file"], os.O_RDONLY)
        stack.callback(os.close, inherited)
        os.set_inheritable(inherited, True)

    def _create_locked_files(self, stack: contextlib.ExitStack) -> None:
        """Choose two standard library files that boxes can read, and set file locks on one of them.

        The thread started by `_start_listeners` regularly reads the other file.
        """
        folder = Path(os.path.realpath(os.__file__)).parent
        self.shared, locked = folder / "this.py", folder / "antigravity.py"
        held = os.open(locked, os.O_RDONLY)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_SH)
        fcntl.fcntl(held, F_OFD_SETLK, struct.pack("hhxxxxqqixxxx", fcntl.F_RDLCK, 0, 0, 0, 0))
        self.facts |= {"shared_folder": str(folder), "shared_file": str(self.shared), "locked_file": str(locked)}
        self.facts |= {"host_name": socket.gethostname(), "host_memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}

    def _start_canary(self, stack: contextlib.ExitStack) -> None:
        command = [sys.executable, "-c", CANARY, str(self.victims["secret_file"])]
        self.canary = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
        stack.callback(self.canary.kill)
        self.facts |= {"canary": self.canary.pid, **json.loads(self._read_canary_line())}

    def _read_canary_line(self) -> bytes:
        """Return the next line printed by the canary process, or b"" after a timeout.

        The timeout is 20 s for the first line, which the canary prints at startup, and 1 s for each
        later line.
        """
        assert self.canary.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.canary.stdout, selectors.EVENT_READ)
            return self.canary.stdout.readline() if selector.select(20 if not self.facts.get("canary") else 1) else b""

    def _start_listeners(self, stack: contextlib.ExitStack) -> None:
        selector = stack.enter_context(selectors.DefaultSelector())

        def listen(family: int, kind: int, address: Any) -> socket.socket:
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen(16)
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            return server

        self.facts["tcp4"] = listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)).getsockname()[1]
        self.facts["tcp6"] = listen(socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)).getsockname()[1]
        self.facts["udp4"] = listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)).getsockname()[1]
        self.facts["abstract"] = f"sandbox-attack-{self.marker}"
        listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.facts["abstract"])
        self.facts["unix_path"] = str(self.folder / "socket")
        listen(socket.AF_UNIX, socket.SOCK_STREAM, self.facts["unix_path"])
        os.chmod(self.facts["unix_path"], 0o777)
        beacon = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        stopped = threading.Event()

        def serve() -> None:
            """Record all data that the listeners receive.

            At least every 50 ms, also send the secret over the loopback interface and read
            `self.shared`. Some attacks try to capture the loopback traffic or to observe accesses
            to this file.
            """
            while not stopped.is_set():
                self.shared.read_bytes()
                beacon.sendto(b"beacon " + self.secret.encode(), ("127.0.0.1", 9))
                for key, _ in selector.select(0.05):
                    sock: socket.socket = key.fileobj  # type: ignore[assignment]
                    if sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        guest = stack.enter_context(sock.accept()[0])
                        selector.register(guest, selectors.EVENT_READ)
                    elif data := sock.recv(4096):
                        self.received += data
                    else:
                        selector.unregister(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stopped.set)

    def snapshot_state(self) -> dict[str, Any]:
        """Return the parts of the host's state that an attack can change."""
        files = {name: (path.read_bytes(), path.stat().st_mode) if path.exists() else None for name, path in self.victims.items()}
        assert self.canary.stdin is not None
        self.canary.stdin.write(b"\n")
        pid = self.canary.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        return files | {
            "canary": self._read_canary_line(),
            "nice": os.getpriority(os.PRIO_PROCESS, pid),
            "limits": limits,
            "name": socket.gethostname(),
            "forward": forward.read_text() if forward.exists() else "",
        }

    def build_source(self, call: str, *, patience_s: float) -> str:
        """Return the source code `call`, preceded by an assignment of `facts` to the variable `W`.

        `W` also contains `patience_s`, which is the time in seconds that the code waits for an
        event. This time must be less than the call timeout.
        """
        return f"W = {self.facts | {'patience_s': patience_s}!r}\n{call}"

    def find_survivors(self) -> list[int]:
        """Return the pids of processes that have the attack's mark as their name, except zombies.

        Processes in nested PID namespaces are included.
        """
        alive = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                marked = entry.name.isdigit() and (entry / "comm").read_text().strip() == self.facts["mark"]
                if marked and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    alive.append(int(entry.name))
        return alive

    def has_succeeded(self, probe: AttackProbe, results: list[CallResult], before: dict[str, Any]) -> bool:
        """Return True if the attack succeeded. Call this method after closing the box.

        `before` is the result of a `snapshot_state` call before the attack.
        """
        texts = "\n".join(f"{result.text}\n{result.stderr}\n{result.error and result.error.message}" for result in results)
        pictures = [picture for result in results for picture in result.images]
        match probe.evidence:
            case Evidence.PRINTED:
                return self.marker in texts
            case Evidence.SECRET:
                return self.secret in texts or any(self.secret.encode() in picture.to_pil().tobytes() for picture in pictures)
            case Evidence.REACHED:
                return self.marker.encode() in self.received
            case Evidence.CHANGED:
                return self.snapshot_state() != before
            case Evidence.HOST_BLAMED:
                return any(result.fault is Fault.HOST for result in results)
            case Evidence.SURVIVED:
                return bool(self.find_survivors())
            case Evidence.OVERWRITTEN:
                first, *_, last = (result.text.strip() for result in results)
                assert len(first) == hashlib.sha256().digest_size * 2, results[0]
                return first != last
            case Evidence.FLOODED:
                limits = self.limits
                longest = max(
                    len(text) for result in results for text in (result.text, result.stderr, result.error.message if result.error else "")
                )
                pixels = max((picture.width * picture.height for picture in pictures), default=0)
                return longest > limits.text + 1000 or len(pictures) > limits.images or pixels > limits.image_pixels
