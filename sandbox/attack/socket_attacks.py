"""Attacks through sockets of every address family, and attacks on IPC objects of the host."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.attack.file_attacks import FILE_LAYERS

NETWORK_LAYERS = frozenset({"net_ns", "seccomp", "landlock"})
RAW_SOCKET_LAYERS = NETWORK_LAYERS | {"drop_uid", "capabilities"}
"""Layers that block raw sockets. Opening a raw socket also requires a capability."""


def _make_send_snippet(family: str, kind: str, address: str) -> str:
    return f's = socket.socket(socket.{family}, socket.{kind})\ns.settimeout(1)\ns.connect({address})\ns.send(W["drow"][::-1].encode())'


INTERNET = (
    AttackProbe(
        "tcp4",
        "internet",
        "TCP to a server of the host",
        Evidence.REACHED,
        (_make_send_snippet("AF_INET", "SOCK_STREAM", '("127.0.0.1", W["tcp4"])'),),
        NETWORK_LAYERS,
    ),
    AttackProbe(
        "tcp6",
        "internet",
        "the same by IPv6",
        Evidence.REACHED,
        (_make_send_snippet("AF_INET6", "SOCK_STREAM", '("::1", W["tcp6"])'),),
        NETWORK_LAYERS,
    ),
    AttackProbe(
        "udp4",
        "internet",
        "UDP",
        Evidence.REACHED,
        (_make_send_snippet("AF_INET", "SOCK_DGRAM", '("127.0.0.1", W["udp4"])'),),
        NETWORK_LAYERS,
    ),
    AttackProbe(
        "http_client",
        "internet",
        "fetch a page of the host with urllib",
        Evidence.REACHED,
        ('import urllib.request\nurllib.request.urlopen(f"http://127.0.0.1:{W[\'tcp4\']}/" + W["drow"][::-1], timeout=0.5)',),
        NETWORK_LAYERS,
    ),
    AttackProbe(
        "icmp",
        "internet",
        "ping the host by a raw socket",
        Evidence.PRINTED,
        (
            """
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
s.settimeout(1)
packet = struct.pack("!BBHHH", 8, 0, 0xf7fd, 1, 1)
s.sendto(packet, ("127.0.0.1", 0))
if s.recv(1024)[20:]:
    pwned()
""",
        ),
        RAW_SOCKET_LAYERS,
        needs_root=True,
    ),
)

FAMILIES = (
    AttackProbe(
        "unix_abstract",
        "other families",
        "an abstract unix socket of the host, which no mount namespace hides",
        Evidence.REACHED,
        (_make_send_snippet("AF_UNIX", "SOCK_STREAM", '"\\0" + W["abstract"]'),),
        NETWORK_LAYERS,
    ),
    AttackProbe(
        "unix_path",
        "other families",
        "a unix socket in the host's file system, as docker.sock is",
        Evidence.REACHED,
        (_make_send_snippet("AF_UNIX", "SOCK_STREAM", 'W["unix_path"]'),),
        FILE_LAYERS | {"net_ns", "seccomp"},
    ),
    AttackProbe(
        "netlink",
        "other families",
        "ask the kernel for the host's interfaces",
        Evidence.PRINTED,
        (
            """
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
s.settimeout(1)
s.send(struct.pack("=IHHII", 17, 18, 0x301, 1, 0) + bytes([0]))
if b"lo\\0" in s.recv(65536) and os.stat("/proc/self/ns/net").st_ino == W["net_ns"]:
    pwned()
""",
        ),
        RAW_SOCKET_LAYERS | FILE_LAYERS,
    ),
    AttackProbe(
        "packet",
        "other families",
        "listen to the host's own traffic",
        Evidence.SECRET,
        (
            """
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.settimeout(1)
for _ in range(50):
    data = s.recv(65536)
    if b"beacon" in data:
        print(data)
        break
""",
        ),
        RAW_SOCKET_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "every_other_family",
        "other families",
        "open a socket of any family from 0 to 64 that the other attacks leave out: vsock, XDP, Bluetooth, ...",
        Evidence.PRINTED,
        (
            """
opened = set()
for family in set(range(65)) - {1, 2, 10, 16, 17}:
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind, 0).close()
            opened.add(family)
        except OSError:
            pass
if opened:
    pwned(opened)
""",
        ),
        RAW_SOCKET_LAYERS,
    ),
    AttackProbe(
        "proc_net",
        "other families",
        "read the host's connections in /proc",
        Evidence.PRINTED,
        ('if f":{W[\'tcp4\']:04X} " in open("/proc/net/tcp").read():\n    pwned()',),
        NETWORK_LAYERS | FILE_LAYERS,
    ),
)

IPC = (
    AttackProbe(
        "shared_memory",
        "ipc",
        "attach a System V segment of the host",
        Evidence.SECRET,
        (
            """
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
where = libc.shmat(libc.shmget(W["shm_key"], 0, 0), None, 0o10000)
if where not in (None, ctypes.c_void_p(-1).value):
    print(ctypes.string_at(where, 64))
""",
        ),
        frozenset({"ipc_ns", "seccomp"}),
    ),
    AttackProbe(
        "message_queue",
        "ipc",
        "take a message from a System V queue of the host",
        Evidence.SECRET,
        (
            """
box = ctypes.create_string_buffer(256)
if libc.msgrcv(libc.msgget(W["msg_key"], 0), box, 248, 0, 0o4000) > 0:
    print(box.raw)
""",
        ),
        frozenset({"ipc_ns", "seccomp"}),
    ),
    AttackProbe(
        "posix_queue",
        "ipc",
        "take a message from a POSIX queue of the host",
        Evidence.SECRET,
        (
            """
box = ctypes.create_string_buffer(8192)
queue = syscall(240, W["queue"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, None)
syscall(243, queue, box, 8192, None, None)
print(box.raw[:64])
""",
        ),
        frozenset({"ipc_ns", "seccomp", "landlock"}),
    ),
)

PROBES = (*INTERNET, *FAMILIES, *IPC)
