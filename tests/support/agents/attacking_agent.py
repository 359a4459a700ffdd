"""Agent of the tests that tries to reach what does not belong to it, and prints what it reached.

usage: attacking_agent.py TARGETS

TARGETS is JSON: `files` to read, `folders` to write to, `ports` to connect to, and `parents`, the
processes to kill. The agent samples one response first, and one after its attacks.
"""

import ctypes
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

TARGETS = json.loads(sys.argv[1])
EXAMPLE = json.loads(Path("example.json").read_text())
LIBC = ctypes.CDLL(None, use_errno=True)
without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(text: str) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with without_proxy.open(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def reached(attack, *arguments) -> bool:  # noqa: ANN001, ANN002
    """Return True if the attack does not raise OSError."""
    try:
        attack(*arguments)
    except OSError:
        return False
    return True


def read(path: str) -> None:
    Path(path).read_bytes()


def write(folder: str) -> None:
    Path(folder, "written").write_text("x")


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def ptrace(pid: int) -> None:
    """Attach to a process without stopping it (PTRACE_SEIZE), in a child, which the sandbox kills for the attempt."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) != 0)"
    if subprocess.run([sys.executable, "-S", "-c", code, str(pid)], stderr=subprocess.DEVNULL).returncode:
        raise OSError


def find_secrets() -> list[str]:
    """Return the environments of other processes, and files of other agents."""
    return [path for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/tmp/agent_*/*")] if reached(read, path)]


first = ask("one")
found = {
    "files": [path for path in TARGETS["files"] if reached(read, path)],
    "folders": [path for path in TARGETS["folders"] if reached(write, path)],
    "ports": [port for port in TARGETS["ports"] if reached(connect, port)],
    "seen": [pid for pid in TARGETS["parents"] if reached(os.kill, pid, 0)],
    "traced": [pid for pid in TARGETS["parents"] if reached(ptrace, pid)],
    "secrets": len(find_secrets()),
    "variables": sorted({*os.environ} - {"LC_CTYPE"}),
    "unix": reached(socket.socket, socket.AF_UNIX),
    "raw": reached(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
    "root": reached(os.setuid, 0),
    "input": reached(Path("example.json").write_text, "{}"),
    "images": [reached(read, path) for path in EXAMPLE["images"]],
}
if TARGETS["kills"]:
    for pid in (*TARGETS["parents"], os.getppid(), 1):
        reached(os.kill, pid, signal.SIGKILL)
    found["survived"] = reached(os.kill, os.getppid(), 0)
print(json.dumps({**found, "texts": [first, ask("two")]}))
