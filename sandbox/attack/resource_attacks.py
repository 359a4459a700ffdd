"""Attacks that exhaust resources: memory, disk, inodes, time and the size of the output."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.attack.file_attacks import FILE_LAYERS

SLOW_LIMITS = {"call_timeout_s": 20}
"""Raised limits for the controls of slow attacks that do not target the timeout."""
MEMORY_LAYERS = frozenset({"rlimits", "cgroup", "watchdog"})
TOUCH_SNIPPET = """for block in blocks:
    if os.fork() == 0:
        for at in range(0, len(block), 4096):
            block[at] = 1
        os._exit(0)
if all(os.wait()[1] == 0 for _ in blocks):
    time.sleep(0.5)
    pwned()
"""
"""Source code in which each child process writes to every page of one block, then exits.

Afterwards, no process owns the memory of the blocks.
"""
MEMORY = (
    AttackProbe(
        "one_process",
        "memory",
        "touch twice the memory of a box",
        Evidence.PRINTED,
        ('block = bytearray(b"x") * W["too_much"]\ntime.sleep(0.5)\npwned(len(block))',),
        MEMORY_LAYERS,
        SLOW_LIMITS,
    ),
    AttackProbe(
        "many_processes",
        "memory",
        "the same in several processes, each well below a limit per process",
        Evidence.PRINTED,
        (
            """
import select
pieces, got = 8, 0
done, tell = os.pipe()
for _ in range(pieces):
    if os.fork() == 0:
        block = bytearray(b"x") * (W["too_much"] // pieces)
        os.write(tell, b"1")
        time.sleep(4)
        os._exit(0)
while got < pieces and select.select([done], [], [], W["patience_s"])[0]:
    got += len(os.read(done, 16))
time.sleep(0.3)
dead = os.waitpid(-1, os.WNOHANG)[0]
print(got, "of", pieces, "and one was killed" if dead else "")
if got == pieces and not dead:
    pwned()
""",
        ),
        MEMORY_LAYERS,
        SLOW_LIMITS,
    ),
    AttackProbe(
        "anonymous_file",
        "memory",
        "allocate memory in an anonymous file (memfd), which belongs to no process",
        Evidence.PRINTED,
        (
            """
fd = syscall(319, b"x", 0)
block = b"x" * (1 << 20)
for _ in range(W["too_much"] >> 20):
    os.write(fd, block)
time.sleep(0.5)
pwned()
""",
        ),
        MEMORY_LAYERS | {"seccomp"},
        SLOW_LIMITS,
    ),
    AttackProbe(
        "shared_mapping",
        "memory",
        "allocate shared memory in four processes, each of which touches one part and exits",
        Evidence.PRINTED,
        (
            """
import mmap
blocks = [mmap.mmap(-1, W["too_much"] // 4) for _ in range(4)]
"""
            + TOUCH_SNIPPET,
        ),
        MEMORY_LAYERS | {"seccomp"},
        SLOW_LIMITS,
    ),
    AttackProbe(
        "shared_device",
        "memory",
        "the same with a shared mapping of /dev/zero",
        Evidence.PRINTED,
        (
            """
import mmap
with open("/dev/zero", "r+b", buffering=0) as zero:
    blocks = [mmap.mmap(zero.fileno(), W["too_much"] // 4) for _ in range(4)]
"""
            + TOUCH_SNIPPET,
        ),
        MEMORY_LAYERS | {"landlock"},
        SLOW_LIMITS,
    ),
)

FILL_SNIPPET = """
block, written = b"x" * (1 << 20), 0
try:
    while written < W["too_full"]:
        with open(f"{where}/fill{{written >> 23}}", "ab") as file:
            file.write(block)
        written += 1 << 20
finally:
    if written >= W["too_full"]:
        pwned(written)
"""
STORAGE_LAYERS = MEMORY_LAYERS | FILE_LAYERS
DISK = (
    AttackProbe("many_files", "disk", "fill the working directory", Evidence.PRINTED, (FILL_SNIPPET.format(where="."),), STORAGE_LAYERS),
    AttackProbe(
        "one_file",
        "disk",
        "one huge file",
        Evidence.PRINTED,
        ('with open("huge", "wb") as file:\n    for _ in range(W["too_full"] >> 20):\n        file.write(b"x" * (1 << 20))\npwned()',),
        STORAGE_LAYERS,
    ),
    AttackProbe(
        "fill_shared_memory",
        "disk",
        "fill /dev/shm, which is memory",
        Evidence.PRINTED,
        (FILL_SNIPPET.format(where="/dev/shm"),),
        STORAGE_LAYERS,
    ),
    AttackProbe(
        "fill_var_tmp",
        "disk",
        "fill /var/tmp, which is overlooked more often than /tmp",
        Evidence.PRINTED,
        (FILL_SNIPPET.format(where="/var/tmp"),),
        STORAGE_LAYERS,
    ),
    AttackProbe(
        "inodes",
        "disk",
        "create empty files until the inodes run out",
        Evidence.PRINTED,
        ('os.mkdir("d")\nfor number in range(W["too_many_files"]):\n    os.close(os.open(f"d/{number}", os.O_CREAT))\npwned()',),
        STORAGE_LAYERS,
    ),
)

SPIN_SNIPPET = 'end = time.{clock}() + W["too_long_s"]\nwhile time.{clock}() < end:\n    {body}\npwned()'
LONG_LIMITS = {"call_timeout_s": 30}
ENDLESS = (
    AttackProbe(
        "loop", "endless", "a loop", Evidence.PRINTED, (SPIN_SNIPPET.format(clock="process_time", body="pass"),), frozenset(), LONG_LIMITS
    ),
    AttackProbe(
        "ignores_signals",
        "endless",
        "a loop that ignores every signal that can be ignored",
        Evidence.PRINTED,
        (
            "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n    signal.signal(number, signal.SIG_IGN)\n"
            + SPIN_SNIPPET.format(clock="process_time", body="pass"),
        ),
        frozenset(),
        LONG_LIMITS,
    ),
    AttackProbe(
        "swallows_exceptions",
        "endless",
        "a loop that catches every exception",
        Evidence.PRINTED,
        (SPIN_SNIPPET.format(clock="monotonic", body="try:\n        time.sleep(0.01)\n    except BaseException:\n        pass"),),
        frozenset(),
        LONG_LIMITS,
    ),
    AttackProbe(
        "inside_c",
        "endless",
        "a single call into C that never returns to the interpreter",
        Evidence.PRINTED,
        ('ctypes.PyDLL(None).sleep(int(W["too_long_s"]) + 1)\npwned()',),
        frozenset(),
        LONG_LIMITS,
    ),
    AttackProbe(
        "burn_in_children",
        "endless",
        "children that burn processor time while the parent waits",
        Evidence.PRINTED,
        (
            """
for _ in range(2):
    if os.fork() == 0:
        end = time.process_time() + W["too_long_s"]
        while time.process_time() < end:
            pass
        os._exit(0)
os.wait()
os.wait()
pwned()
""",
        ),
        frozenset(),
        LONG_LIMITS,
    ),
)

OUTPUT_LIMITS = {"text": 1 << 30, "file": 1 << 30, "images": 1000, "image_pixels": 1 << 30, "image_bytes": 1 << 30}
FLOODS = (
    AttackProbe(
        "print", "output", "print 8 MB", Evidence.FLOODED, ('for _ in range(8):\n    print("x" * (1 << 20))',), frozenset(), OUTPUT_LIMITS
    ),
    AttackProbe(
        "raw_write",
        "output",
        "write to the descriptors instead of print",
        Evidence.FLOODED,
        ('for fd in (1, 2):\n    for _ in range(64):\n        os.write(fd, b"x" * 65536)',),
        frozenset(),
        OUTPUT_LIMITS,
    ),
    AttackProbe(
        "print_to_stderr",
        "output",
        "print 4 MB as errors",
        Evidence.FLOODED,
        ('sys.stderr.write("x" * (4 << 20))',),
        frozenset(),
        OUTPUT_LIMITS,
    ),
    AttackProbe(
        "many_images",
        "output",
        "return forty images in one call",
        Evidence.FLOODED,
        ('from PIL import Image\nfor number in range(40):\n    Image.new("RGB", (64, 64), (number, 0, 0)).show()',),
        frozenset(),
        OUTPUT_LIMITS,
    ),
    AttackProbe(
        "forged_images",
        "output",
        "forge a reply with forty images, past the limits of the box's worker",
        Evidence.FLOODED,
        (
            """
import gc
from io import BytesIO
from PIL import Image
channel = next(thing for thing in gc.get_objects() if isinstance(thing, socket.socket))
file = BytesIO()
Image.new("RGB", (64, 64)).save(file, "PNG")
reply = {"id": 1, "error": None, "limit": None, "sources": ["show"] * 40, "dropped": [], "files": {}, "cpu_s": 0.0, "memory": 1}
channel.sendall(sys.modules["megatron_rl_sandbox.frames"].pack_frame(reply, [file.getvalue()] * 40))
""",
        ),
        frozenset(),
        OUTPUT_LIMITS,
    ),
    AttackProbe(
        "huge_image",
        "output",
        "return one image of nine million pixels",
        Evidence.FLOODED,
        ('from PIL import Image\nImage.new("L", (3000, 3000)).show()',),
        frozenset(),
        OUTPUT_LIMITS,
    ),
)

PROBES = (*MEMORY, *DISK, *ENDLESS, *FLOODS)
