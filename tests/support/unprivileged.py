"""Run by root, executes a command as a user without any rights, with mounts that make the
interpreter accessible to this user.

    python unprivileged.py COMMAND...

An interpreter often lies below a home folder that only its owner may enter. Such folders are
covered by accessible ones that contain only the interpreter.
"""

import os
import sys
from pathlib import Path

from megatron_rl_sandbox import kernel

UID = 123456789
ROOT = Path(__file__).resolve().parents[2]


def find_private_parent(path: Path) -> Path | None:
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


def main() -> None:
    needed = {Path(os.path.realpath(path)) for path in (sys.base_prefix, sys.prefix, ROOT)}
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    for closed in {find_private_parent(path) for path in needed} - {None}:
        inside = {path: os.open(path, os.O_PATH) for path in needed if path.is_relative_to(closed)}
        kernel.mount("tmpfs", str(closed), kind="tmpfs", data="mode=755")
        for path, descriptor in sorted(inside.items()):  # a folder before its contents
            path.mkdir(parents=True, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{descriptor}", str(path), flags=kernel.MS_BIND | kernel.MS_REC)
            os.close(descriptor)
    os.chdir(ROOT)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
