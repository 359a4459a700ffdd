"""Attacks on files of the host and of other boxes, on environment variables and on input images."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence

FILE_LAYERS = frozenset({"mount_ns", "read_only_root", "private_tmp", "landlock", "drop_uid", "capabilities"})
"""Layers that restrict which files a box can read and write."""
FILE_AND_PROCESS_LAYERS = FILE_LAYERS | {"pid_ns", "seccomp"}
"""Layers that restrict file access or hide the /proc entries of other processes."""

HOST_FILES = (
    AttackProbe(
        "read_file",
        "host files",
        "open a readable file of the host",
        Evidence.SECRET,
        ('print(open(W["secret_file"]).read())',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "read_private_file",
        "host files",
        "open a file that only the server's user may read",
        Evidence.SECRET,
        ('print(open(W["private_file"]).read())',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "read_through_symlink",
        "host files",
        "read it through a link in the working directory",
        Evidence.SECRET,
        ('os.symlink(W["secret_file"], "notes.txt")\nprint(open("notes.txt").read())',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "image_through_symlink",
        "host files",
        "show an image of the host through a link",
        Evidence.SECRET,
        ('from PIL import Image\nos.symlink(W["secret_image"], "plot.png")\nImage.open("plot.png").show()',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "read_through_proc_root",
        "host files",
        "read it through /proc/PID/root of every visible process",
        Evidence.SECRET,
        (
            """
for entry in sorted(os.listdir("/proc")):
    if entry.isdigit():
        try:
            print(open(f"/proc/{entry}/root" + W["secret_file"]).read())
        except OSError:
            pass
""",
        ),
        FILE_AND_PROCESS_LAYERS,
    ),
    AttackProbe(
        "read_other_box",
        "host files",
        "find the file of a second box in the same pool",
        Evidence.SECRET,
        (
            """
import glob
places = [*glob.glob("/proc/[0-9]*/cwd"), "/tmp", "/var/tmp", "/dev/shm", os.path.dirname(os.getcwd())]
for place in places:
    for folder, inner, names in os.walk(place):
        if folder.count("/") - place.count("/") > 4:  # a /tmp of the host may hold anything
            inner.clear()
        if "neighbour.txt" in names and len(folder) < 200:
            print(open(os.path.join(folder, "neighbour.txt")).read())
""",
        ),
        FILE_AND_PROCESS_LAYERS,
    ),
)

ENVIRONMENT = (
    AttackProbe(
        "environ",
        "environment",
        "print the environment, which may contain API keys of judges",
        Evidence.SECRET,
        ("print(dict(os.environ))",),
        uses_plain_child=True,
    ),
    AttackProbe(
        "proc_self_environ",
        "environment",
        "read the initial environment of the interpreter (/proc/self/environ)",
        Evidence.SECRET,
        ('print(open("/proc/self/environ").read())',),
        uses_plain_child=True,
    ),
    AttackProbe(
        "proc_other_environ",
        "environment",
        "read the environment of every visible process",
        Evidence.SECRET,
        (
            """
for entry in os.listdir("/proc"):
    if entry.isdigit():
        try:
            print(open(f"/proc/{entry}/environ").read())
        except OSError:
            pass
""",
        ),
        FILE_AND_PROCESS_LAYERS | {"user_ns"},
    ),
    AttackProbe(
        "inherited_descriptors",
        "environment",
        "read every file descriptor that was left open",
        Evidence.SECRET,
        (
            """
for number in range(3, 256):
    try:
        if os.path.isfile(f"/proc/self/fd/{number}") or os.fstat(number).st_mode & 0o170000 == 0o100000:
            print(os.pread(number, 4096, 0))
    except OSError:
        pass
""",
        ),
        uses_plain_child=True,
    ),
)

HOST_WRITES = (
    AttackProbe(
        "overwrite_file",
        "host writes",
        "overwrite a world-writable file of the host",
        Evidence.CHANGED,
        ('open(W["victim_file"], "w").write("gone")',),
        FILE_LAYERS,
    ),
    AttackProbe("delete_file", "host writes", "delete it", Evidence.CHANGED, ('os.unlink(W["victim_file"])',), FILE_LAYERS),
    AttackProbe(
        "create_in_shared_memory",
        "host writes",
        "leave a file in the host's /dev/shm",
        Evidence.CHANGED,
        ('open(W["shm_file"], "w").write("here")',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "append_to_private_file",
        "host writes",
        "append to a file of the server's user, such as a start-up script",
        Evidence.CHANGED,
        ('open(W["private_file"], "a").write("gone")',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "change_mode",
        "host writes",
        "make a private file world-writable",
        Evidence.CHANGED,
        ('os.chmod(W["private_file"], 0o666)',),
        FILE_LAYERS,
    ),
    AttackProbe(
        "write_sysctl",
        "host writes",
        "turn on forwarding in the host's network through /proc/sys",
        Evidence.CHANGED,
        ('open("/proc/sys/net/ipv4/ip_forward", "w").write("1")',),
        FILE_LAYERS | {"net_ns", "seccomp"},
        needs_root=True,
    ),
)

HASH_IMAGE_SNIPPET = 'import hashlib\nprint(hashlib.sha256(open("image_0.png", "rb").read()).hexdigest())'
"""Source code that prints the input image's hash, run before and after an attack on the image."""
INPUT_IMAGE = tuple(
    AttackProbe(name, "input image", aim, Evidence.OVERWRITTEN, (HASH_IMAGE_SNIPPET, code, HASH_IMAGE_SNIPPET), FILE_LAYERS)
    for name, aim, code in (
        ("save_over", "save an image under the input's name", 'from PIL import Image\nImage.new("RGB", (8, 8)).save("image_0.png")'),
        ("chmod_and_write", "make it writable first", 'os.chmod("image_0.png", 0o666)\nopen("image_0.png", "wb").write(b"x")'),
        ("replace", "rename another file over it", 'open("x", "wb").write(b"x")\nos.replace("x", "image_0.png")'),
        ("delete_and_create", "delete it and write a new one", 'os.unlink("image_0.png")\nopen("image_0.png", "wb").write(b"x")'),
        (
            "link_and_truncate",
            "truncate it through a hard link",
            'os.link("image_0.png", "other.png")\nos.truncate("other.png", 0)',
        ),
    )
)

PROBES = (*HOST_FILES, *ENVIRONMENT, *HOST_WRITES, *INPUT_IMAGE)
