"""Tests every isolation layer, each in its own child process.

The command `python -m megatron_rl_sandbox.layer_probe` prints a JSON object that maps each layer to
null, or to the reason why the layer is not available.
"""

import json
import os
import tempfile
from collections.abc import Callable

from megatron_rl_sandbox import cgroups, confine, kernel, landlock, mounts, resource_usage, seccomp
from megatron_rl_sandbox.layers import LAYER_NAMES, Layers
from megatron_rl_sandbox.records import BoxLimits


def try_in_child(trial: Callable[[], None]) -> str | None:
    """Run `trial` in a child process. Return None if `trial` succeeds, else the error message."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trial()
        except (OSError, AssertionError) as error:
            os.write(writing, str(error).encode()[:1000] or b"?")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        reason = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return reason or (None if status == 0 else f"the test process died with status {status}")


def probe_layers() -> dict[str, str | None]:
    """Try to enter each layer, and return the results keyed by layer name.

    A result is None, or the reason for the failure.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    outer = Layers() if is_privileged() else Layers(user_ns=True)

    def enter(flags: int) -> Callable[[], None]:
        def try_it() -> None:
            confine.enter_zygote_layers(outer, proc=proc)
            kernel.unshare(flags)
            if flags == kernel.CLONE_NEWPID:
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)

        return try_it

    def root() -> None:
        confine.enter_zygote_layers(Layers(user_ns=outer.user_ns, mount_ns=True, read_only_root=True), proc=proc)

    def private_tmp() -> None:
        root()
        mounts.mount_box_tmpfs(mounts.BOX_DIR, num_bytes=1 << 20, num_inodes=16)
        mounts.write_inputs(mounts.BOX_DIR, {"a": b"a"}, owner=None, mounted=True)

    trials: dict[str, Callable[[], None]] = {
        "user_ns": lambda: confine.enter_zygote_layers(Layers(user_ns=True), proc=proc),
        "mount_ns": enter(kernel.CLONE_NEWNS),
        "read_only_root": root,
        "private_tmp": private_tmp,
        "net_ns": enter(kernel.CLONE_NEWNET),
        "pid_ns": enter(kernel.CLONE_NEWPID),
        "ipc_ns": enter(kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS),
        "cgroup": try_cgroup,
        "watchdog": lambda: resource_usage.measure_usage(os.getppid(), count_mappings=True) and None,
        "rlimits": lambda: confine.set_rlimits(BoxLimits(), base_data_bytes=1 << 30, base_address_bytes=1 << 40),
        "drop_uid": try_drop_uid,
        "capabilities": with_no_new_privs(kernel.drop_capabilities),
        "landlock": with_no_new_privs(lambda: landlock.restrict_paths(readable=[tempfile.gettempdir()], writable=[])),
        "seccomp": with_no_new_privs(lambda: seccomp.install_filter(shared_memory=True)),
    }
    assert list(trials) == LAYER_NAMES, f"{list(trials)} against {LAYER_NAMES}"
    return {name: try_in_child(trial) for name, trial in trials.items()}


def try_drop_uid() -> None:
    """Switch this process to the user ID of a box.

    Raises OSError if the switch is not permitted.
    """
    uid = confine.box_uid(os.getpid(), 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def with_no_new_privs(enter_layer: Callable[[], None]) -> Callable[[], None]:
    """Return a function that sets no_new_privs and then calls `enter_layer`."""

    def try_it() -> None:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        enter_layer()

    return try_it


def is_privileged() -> bool:
    """Return True if this process can create namespaces without first creating a user namespace."""
    return try_in_child(lambda: kernel.unshare(kernel.CLONE_NEWNS)) is None


def try_cgroup() -> None:
    """Create a control group and move a process into it. Raises OSError if either step fails."""
    groups = cgroups.ControlGroups(size=1, limits=BoxLimits())
    try:
        child = os.fork()
        if child == 0:
            groups.slots[0].add_process(os.getpid())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise OSError("processes cannot be moved into a control group")
    finally:
        groups.close()


if __name__ == "__main__":
    print(json.dumps(probe_layers()))
