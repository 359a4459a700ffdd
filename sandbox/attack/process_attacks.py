"""Attacks that signal or debug other processes, and attacks that start too many processes."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence

PROCESS_LAYERS = frozenset({"pid_ns", "drop_uid", "capabilities", "landlock", "seccomp"})
"""Layers that hide host processes from a box, or deny the box access to host processes."""
DEBUG_LAYERS = PROCESS_LAYERS | {"mount_ns", "read_only_root", "user_ns"}
"""Layers that prevent debugging. A process cannot debug processes of another user namespace."""
MARK_SNIPPET = 'libc.prctl(15, W["mark"].encode(), 0, 0, 0)'
"""Source code that sets the process name that the oracle uses to find surviving processes."""

SIGNALS = (
    AttackProbe(
        "kill",
        "signals",
        "signal a process of the host by its number",
        Evidence.CHANGED,
        ('os.kill(W["canary"], signal.SIGWINCH)',),
        PROCESS_LAYERS,
    ),
    AttackProbe(
        "kill_all", "signals", "signal all visible processes at once", Evidence.CHANGED, ("os.kill(-1, signal.SIGWINCH)",), PROCESS_LAYERS
    ),
    AttackProbe(
        "pidfd",
        "signals",
        "signal it through a file descriptor of the process",
        Evidence.CHANGED,
        ('syscall(424, syscall(434, W["canary"], 0), int(signal.SIGWINCH), None, 0)',),
        PROCESS_LAYERS,
    ),
    AttackProbe(
        "stop_server",
        "signals",
        "stop a process without killing it",
        Evidence.CHANGED,
        ('os.kill(W["canary"], signal.SIGSTOP)',),
        PROCESS_LAYERS,
    ),
    AttackProbe(
        "renice",
        "signals",
        "make a process of the host slow",
        Evidence.CHANGED,
        ('os.setpriority(os.PRIO_PROCESS, W["canary"], 19)',),
        PROCESS_LAYERS,
    ),
    AttackProbe(
        "lower_limits",
        "signals",
        "lower the limits of a process of the host",
        Evidence.CHANGED,
        ('import resource\nresource.prlimit(W["canary"], resource.RLIMIT_NOFILE, (17, 17))',),
        PROCESS_LAYERS,
    ),
)

PTRACE = (
    AttackProbe(
        "attach",
        "debugging",
        "ptrace a process of the host",
        Evidence.PRINTED,
        (
            """
syscall(101, 16, W["canary"], None, None)
os.waitpid(W["canary"], 0x40000000)
syscall(101, 17, W["canary"], None, None)
pwned()
""",
        ),
        DEBUG_LAYERS,
    ),
    AttackProbe(
        "read_memory",
        "debugging",
        "read its memory with process_vm_readv",
        Evidence.SECRET,
        (
            """
box = ctypes.create_string_buffer(64)
here = struct.pack("QQ", ctypes.addressof(box), 64)
there = struct.pack("QQ", W["address"], 64)
syscall(310, W["canary"], here, 1, there, 1, 0)
print(box.raw)
""",
        ),
        DEBUG_LAYERS,
    ),
    AttackProbe(
        "proc_mem",
        "debugging",
        "read its memory through /proc/PID/mem",
        Evidence.SECRET,
        ('fd = os.open(f"/proc/{W[\'canary\']}/mem", os.O_RDONLY)\nprint(os.pread(fd, 64, W["address"]))',),
        DEBUG_LAYERS,
    ),
    AttackProbe(
        "write_memory",
        "debugging",
        "write its memory with process_vm_writev",
        Evidence.CHANGED,
        (
            """
box = ctypes.create_string_buffer(b"overwritten", 12)
here = struct.pack("QQ", ctypes.addressof(box), 11)
there = struct.pack("QQ", W["scratch"], 11)
syscall(311, W["canary"], here, 1, there, 1, 0)
""",
        ),
        DEBUG_LAYERS,
    ),
    AttackProbe(
        "steal_descriptor",
        "debugging",
        "copy an open file of a process of the host with pidfd_getfd",
        Evidence.SECRET,
        ('print(os.pread(syscall(438, syscall(434, W["canary"], 0), W["canary_fd"], 0), 64, 0))',),
        DEBUG_LAYERS,
    ),
)

COUNT_SNIPPET = """
living = 0
try:
    while living < W["many"]:
        {start}
        living += 1
finally:
    if living >= W["many"]:
        pwned(living)
"""
"""Source code that runs `{start}` until there are four times as many processes as allowed."""
TASK_LAYERS = frozenset({"rlimits", "cgroup", "watchdog"})
CLEANUP_LAYERS = frozenset({"pid_ns", "cgroup", "watchdog", "drop_uid"})
"""Layers that ensure that closing a box kills all its processes, even those in new sessions."""
FORKS = (
    AttackProbe(
        "fork_bomb",
        "fork bombs",
        "fork in a loop",
        Evidence.PRINTED,
        (COUNT_SNIPPET.format(start="if os.fork() == 0:\n            time.sleep(4)\n            os._exit(0)"),),
        TASK_LAYERS,
        {"call_timeout_s": 20},
    ),
    AttackProbe(
        "thread_bomb",
        "fork bombs",
        "start threads in a loop",
        Evidence.PRINTED,
        ("import threading\n" + COUNT_SNIPPET.format(start="threading.Thread(target=time.sleep, args=(2,), daemon=True).start()"),),
        TASK_LAYERS,
        {"call_timeout_s": 20},
    ),
    AttackProbe(
        "tree",
        "fork bombs",
        "every process forks two more",
        Evidence.PRINTED,
        (
            """
import select
heard, told = os.pipe()
root = os.getpid()
for depth in range(7):
    for side in (0, 1):
        if os.fork() == 0:
            os.write(told, b"1")
            break
    else:
        break
if os.getpid() == root:
    living, end = 1, time.monotonic() + W["patience_s"]
    while living < W["many"] and select.select([heard], [], [], max(0, end - time.monotonic()))[0]:
        living += len(os.read(heard, 256))
    print(living, "processes")
    if living >= W["many"]:
        pwned()
else:
    time.sleep(W["patience_s"])
    os._exit(0)
""",
        ),
        TASK_LAYERS,
        {"call_timeout_s": 20},
    ),
    AttackProbe(
        "daemon",
        "fork bombs",
        "leave a process in its own session that continues after the interpreter exits",
        Evidence.SURVIVED,
        (
            f"""
if os.fork() == 0:
    os.setsid()
    {MARK_SNIPPET}
    os.closerange(0, 256)
    time.sleep(20)
os._exit(0)
""",
        ),
        CLEANUP_LAYERS,
    ),
    AttackProbe(
        "daemon_after_timeout",
        "fork bombs",
        "the same, in a call that exceeds its time limit",
        Evidence.SURVIVED,
        (
            f"""
if os.fork() == 0:
    os.setsid()
    {MARK_SNIPPET}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(20)
    os._exit(0)
while True:
    time.sleep(1)
""",
        ),
        uses_plain_child=True,
    ),
)

PROBES = (*SIGNALS, *PTRACE, *FORKS)
