"""Attacks that use kernel memory, evade memory accounting, or take CPU cores from other boxes."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.attack.resource_attacks import MEMORY_LAYERS, SLOW_LIMITS

SECCOMP_MEMORY_LAYERS = MEMORY_LAYERS | {"seccomp"}
CROWD_SIZE, SMALL_CROWD_SIZE = 14, 4
"""Default and reduced number of child processes per attack.

Both numbers are below the process limit of a box.
"""
START = """
done, tell = os.pipe()
got = dead = 0
def leave_when_told(work):
    try:
        kept = work()
        os.write(tell, b"1")
        time.sleep(60)
    finally:
        os._exit(0)
"""
GATHER = """
import select
end = time.monotonic() + 2 * W["patience_s"]
while got < {num} and not dead and time.monotonic() < end:
    if select.select([done], [], [], 0.1)[0]:
        got += len(os.read(done, 64))
    dead = {waits} and os.waitpid(-1, os.WNOHANG)[0]
"""
JUDGE = (
    GATHER
    + """
time.sleep(0.4)
dead = dead or {waits} and os.waitpid(-1, os.WNOHANG)[0]
print(got, "of {num}", "and one was killed" if dead else "")
if got == {num} and not dead:
    pwned()
"""
)


def make_crowd_calls(work: str, *, num: int = CROWD_SIZE, waits: bool = True) -> tuple[str, ...]:
    """Return the calls of an attack that runs `work` in `num` concurrent processes.

    Each call is a string of source code. The processes are children of the interpreter. The
    children keep running between the calls, so an attack can last longer than a single call. The
    attack succeeds if all children finish their work and are alive afterwards.

    Args:
        work: Source code that defines the function `work`.
        num: Number of child processes.
        waits: True if the attack counts as failed when a child exits. If False, exits are not
            checked.
    """
    begin = f"{START}\n{work}\nfor _ in range({num}):\n    if os.fork() == 0:\n        leave_when_told(work)"
    return (begin, GATHER.format(num=num, waits=waits), JUDGE.format(num=num, waits=waits))


FILL = f"""
def work():
    filled, pairs = 0, []
    while filled < W["too_much"] // {CROWD_SIZE}:
        pairs.append(socket.socketpair())
        for end in pairs[-1]:
            os.set_blocking(end.fileno(), False)
            os.set_inheritable(end.fileno(), True)
            try:
                while True:
                    filled += os.write(end.fileno(), b"x" * 32768)
            except BlockingIOError:
                pass
    return pairs
"""
SPLIT = f"""
libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def split(num):
    where = libc.mmap(None, num * 4096, 3, 0x4022, -1, 0)
    for block in range(where, where + num * 4096, 1000 * 4096):
        for page in range(block, block + 1000 * 4096, 4096):
            ctypes.memset(page, 1, 1)
        for page in range(block, block + 1000 * 4096, 8192):
            if libc.mprotect(page, 4096, 1):
                raise MemoryError("mprotect")
        libc.madvise(block, 1000 * 4096, 4)
def descend(depth):
    os.write(tell, b"1")
    if depth < {CROWD_SIZE} and os.fork() == 0:
        descend(depth + 1)
    time.sleep(60)
"""
KERNEL_MEMORY = (
    AttackProbe(
        "page_tables",
        "kernel memory",
        "read one byte in every 2 MB of a huge mapping, which allocates page tables but no private page",
        Evidence.PRINTED,
        (
            """
import mmap
span = W["too_much"] << 9
block = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
block.madvise(15)
for at in range(0, span, 1 << 21):
    block[at]
time.sleep(0.5)
pwned()
""",
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
    AttackProbe(
        "socket_buffers",
        "kernel memory",
        "fill socket pairs that no process reads",
        Evidence.PRINTED,
        make_crowd_calls(FILL),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
    AttackProbe(
        "byte_locks",
        "kernel memory",
        "lock every second byte of its own files: 30 MB of kernel memory for 150,000 locks",
        Evidence.PRINTED,
        (
            """
import fcntl
files = [os.open(f"l{number}", os.O_RDWR | os.O_CREAT) for number in range(150)]
for file in files:
    for at in range(2000, 0, -2):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
pwned()
""",
        ),
        SECCOMP_MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
    AttackProbe(
        "large_pipes",
        "kernel memory",
        "widen pipes from 64 KB to 1 MB",
        Evidence.PRINTED,
        (
            "import fcntl\nends = [os.pipe()[1] for _ in range(32)]\n"
            "if {fcntl.fcntl(end, 1031, 1 << 20) for end in ends} == {1 << 20}:\n    pwned()",
        ),
        SECCOMP_MEMORY_LAYERS,
    ),
    AttackProbe(
        "mappings",
        "kernel memory",
        "create tens of thousands of mappings, inherited from child to child with links to those of all ancestors",
        Evidence.PRINTED,
        (
            f"{START}\n{SPLIT}\nif os.fork() == 0:\n    split(32000)\n    descend(1)",
            *(GATHER.format(num=CROWD_SIZE, waits=True) for _ in range(3)),
            JUDGE.format(num=CROWD_SIZE, waits=True),
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
)

DODGES = (
    AttackProbe(
        "first_thread_gone",
        "dodges",
        "hold memory in processes whose first thread has ended, for which /proc/PID reports none",
        Evidence.PRINTED,
        make_crowd_calls(
            f"""
import threading
def work():
    held = []
    def hold():
        held.append(b"x" * (W["too_much"] // {SMALL_CROWD_SIZE}))
        os.write(tell, b"1")
        time.sleep(60)
    threading.Thread(target=hold).start()
    syscall(60, 0)
""",
            num=SMALL_CROWD_SIZE,
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
    AttackProbe(
        "hops",
        "dodges",
        "pass memory on to a child and exit, faster than /proc can be scanned",
        Evidence.PRINTED,
        make_crowd_calls(
            f"""
def work():
    block = b"x" * (W["too_much"] // {CROWD_SIZE})
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
    return block
""",
            waits=False,
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
    AttackProbe(
        "unreadable_program",
        "dodges",
        "fill sockets in unreadable programs, whose open descriptors cannot be listed",
        Evidence.PRINTED,
        make_crowd_calls(
            FILL.replace("def work", "def fill")
            + """
import shutil
shutil.copy("/bin/sleep", "s")
os.chmod("s", 0o111)
def work():
    pairs = fill()
    os.write(tell, b"1")
    os.execv("./s", ["s", "60"])
"""
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
        has_long_timeout=True,
    ),
)

SHARES = (
    AttackProbe(
        "more_cores",
        "shares",
        "keep children running between two calls, on more than the one core of a box",
        Evidence.PRINTED,
        (
            f"""
began, told = time.monotonic(), os.pipe()
for _ in range({CROWD_SIZE}):
    if os.fork() == 0:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        os.write(told[1], struct.pack("dd", time.process_time(), time.monotonic()))
        os._exit(0)
""",
            "time.sleep(1.2)",
            f"""
spent, ends = zip(*(struct.unpack("dd", os.read(told[0], 16)) for _ in range({CROWD_SIZE})))
cores = sum(spent) / (max(ends) - began)
print(f"{{cores:.2f}} cores")
if cores > 1.3:  # one core gives 1 at most
    pwned()
""",
        ),
        frozenset({"cgroup", "watchdog"}),
        SLOW_LIMITS,
        min_cores=2,
        has_long_timeout=True,
    ),
    AttackProbe(
        "choose_cores",
        "shares",
        "move to other cores, such as those of another box or of the trainer",
        Evidence.PRINTED,
        ("os.sched_setaffinity(0, range(os.cpu_count() or 1))\npwned(os.sched_getaffinity(0))",),
        frozenset({"seccomp"}),
    ),
    AttackProbe(
        "priority",
        "shares",
        "raise its priority above that of all other processes",
        Evidence.PRINTED,
        ("os.setpriority(os.PRIO_PROCESS, 0, -10)\npwned()",),
        frozenset({"seccomp", "capabilities", "drop_uid"}),
        needs_root=True,
    ),
    AttackProbe(
        "locked_memory",
        "shares",
        "lock memory, which the host can then neither swap nor move",
        Evidence.PRINTED,
        ("block = ctypes.create_string_buffer(65536)\nsyscall(149, ctypes.addressof(block), 65536)\npwned()",),
        frozenset({"seccomp", "rlimits"}),
    ),
)

PROBES = (*KERNEL_MEMORY, *DODGES, *SHARES)
