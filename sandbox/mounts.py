"""File system of a box: a read-only root shared by all boxes of a zygote, and the box's own tmpfs.

    /          read-only tmpfs that contains only the interpreter's prefixes, /usr and links to
               /usr, a few files of /etc, and five devices
    /box       the box's tmpfs: work/ (its working directory), tmp/ (target of /tmp and /dev/shm)

/proc, /sys and /home do not exist in a box. The only part of this project that a box contains is
the virtual environment.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl_sandbox import kernel

BOX_DIR = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WRITABLE_DEVICES = ("/dev/null", "/dev/full")  # not /dev/zero: its writable mappings are memory that no process owns
ETC_PATHS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/fonts", "/etc/mime.types")
ROOT_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Directory of the zygote's mount namespace on which the new root is built. /sys exists on every
# host, and boxes need no file in it.
STAGING_DIR = "/sys"


def system_paths(readable: Sequence[str] = ()) -> list[str]:
    """Return the resolved host paths that boxes can read and execute, without nested paths.

    `readable` contains paths in addition to those that every box needs.
    """
    wanted = [
        *readable,
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        "/usr",
        *(path for path in ROOT_FOLDERS if not os.path.islink(path)),
        *ETC_PATHS,
    ]
    found = sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)})
    return [path for path in found if not any(path.startswith(other.rstrip("/") + "/") for other in found if other != path)]


def find_exposing_path(path: str, readable: Sequence[str] = ()) -> str | None:
    """Return the system path through which boxes can read `path`, or None if they cannot."""
    real = os.path.realpath(path)
    return next((shown for shown in system_paths(readable) if f"{real}/".startswith(shown.rstrip("/") + "/")), None)


def build_root(readable: Sequence[str] = ()) -> None:
    """Replace the root of this mount namespace permanently.

    `readable` contains paths of the host that the new root shows in addition to the system paths.
    Never call this function in the host's own mount namespace.
    """
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = system_paths(readable)
    kernel.mount("tmpfs", STAGING_DIR, kind="tmpfs", flags=kernel.MS_NOSUID, data="size=1m,mode=755")
    for path in sources:
        bind_mount(path, STAGING_DIR + path)
        kernel.harden_mount(STAGING_DIR + path, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV)
    for path in DEVICES:
        bind_mount(path, STAGING_DIR + path)
    for path in {*ROOT_FOLDERS, *ETC_PATHS, sys.prefix, sys.base_prefix, *readable}:
        if os.path.exists(path) and os.path.realpath(path) != path and not os.path.lexists(STAGING_DIR + path):
            os.makedirs(os.path.dirname(STAGING_DIR + path), mode=0o755, exist_ok=True)
            os.symlink(os.path.realpath(path), STAGING_DIR + path)
    os.makedirs(STAGING_DIR + BOX_DIR, exist_ok=True)
    # If the interpreter is below /tmp, that directory exists already and cannot become a link.
    # Temporary files then reach the box's tmp/ only through TMPDIR.
    if not os.path.lexists(f"{STAGING_DIR}/tmp"):
        os.symlink(f"{BOX_DIR}/tmp", f"{STAGING_DIR}/tmp")
    os.symlink(f"{BOX_DIR}/tmp", f"{STAGING_DIR}/dev/shm")
    os.mkdir(f"{STAGING_DIR}/old")
    kernel.pivot_root(STAGING_DIR, f"{STAGING_DIR}/old")
    os.chdir("/")
    kernel.umount("/old")
    os.rmdir("/old")
    kernel.harden_mount("/", kernel.MOUNT_ATTR_RDONLY, recursive=False)


def bind_mount(source: str, target: str) -> None:
    """Bind-mount `source` and all mounts below it at `target`, and create `target` if missing."""
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        Path(target).touch()
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)


def mount_box_tmpfs(directory: str, *, num_bytes: int, num_inodes: int) -> None:
    """Mount a new tmpfs at `directory` in this mount namespace."""
    options = f"size={num_bytes},nr_inodes={num_inodes},mode=755"
    kernel.mount("tmpfs", directory, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=options)


def make_directories(directory: str, *, owner: int | None) -> str:
    """Create work/ and tmp/ in the box's directory and return the path of work/.

    `owner` is the user id that will own the directories. If `owner` is None, the user of this
    process owns the directories.
    """
    for name in ("work", "tmp"):
        path = f"{directory}/{name}"
        os.mkdir(path, 0o700)
        _set_owner(path, owner)
    return f"{directory}/work"


def write_inputs(work: str, inputs: Mapping[str, bytes], *, owner: int | None, mounted: bool) -> None:
    """Write inputs as read-only files below `work`.

    If `mounted` is True, each file also becomes a read-only mount, so that it cannot be replaced,
    renamed or deleted. `owner` has the same meaning as in `make_directories`.
    """
    for name, content in inputs.items():
        path = f"{work}/{name}"
        for folder in reversed(Path(name).parents[:-1]):
            if not os.path.isdir(f"{work}/{folder}"):
                os.mkdir(f"{work}/{folder}", 0o700)
                _set_owner(f"{work}/{folder}", owner)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        _set_owner(path, owner)
        if mounted:
            kernel.mount(path, path, flags=kernel.MS_BIND)
            kernel.harden_mount(path, kernel.MOUNT_ATTR_RDONLY)


def _set_owner(path: str, owner: int | None) -> None:
    if owner is not None:
        os.chown(path, owner, owner)


def tmpfs_size(disk: int, inputs: Sequence[bytes]) -> int:
    """Return the size of a box's tmpfs in bytes.

    The size is `disk` plus the sizes of all inputs, each rounded up to full pages.
    """
    return disk + sum(-(-len(content) // 4096) * 4096 for content in inputs)
