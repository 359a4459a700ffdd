"""Attacks on the fault diagnosis, in which the code makes its own failure look like a host fault.

After a host fault, the code is run again instead of being scored, so such an attack would avoid a
low score.
"""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence

SECCOMP_LAYERS = frozenset({"seccomp"})
FROM_KERNEL = "info = (ctypes.c_int * 32)()\ninfo[0], info[2] = {number}, 0x80\n"
"""Source code that builds a siginfo_t which claims that the kernel sent signal `{number}`."""

PROBES = (
    AttackProbe(
        "kill_as_kernel",
        "blame",
        "send itself, as process 1, a SIGKILL that claims to come from the kernel",
        Evidence.HOST_BLAMED,
        (FROM_KERNEL.format(number=9) + "syscall(129, os.getpid(), 9, info)",),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "kill_by_pidfd",
        "blame",
        "the same through a file descriptor of the process",
        Evidence.HOST_BLAMED,
        (FROM_KERNEL.format(number=9) + "syscall(424, os.pidfd_open(os.getpid()), 9, info, 0)",),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "stop_as_kernel",
        "blame",
        "stop process 1, which otherwise only the host can do, and with it the call's clock",
        Evidence.PRINTED,
        (
            FROM_KERNEL.format(number=19) + "began = time.monotonic()\n"
            "if os.fork() == 0:\n    time.sleep(0.5)\n    os.kill(1, signal.SIGCONT)\n    os._exit(0)\n"
            "syscall(129, os.getpid(), 19, info)\nif time.monotonic() - began > 0.4:\n    pwned()",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "processor_time",
        "blame",
        "lower the CPU time limit at which the kernel kills even process 1",
        Evidence.PRINTED,
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\npwned()",),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "core_dumps",
        "blame",
        "start the host's core dump handler, by the core size limit that permits a piped handler",
        Evidence.PRINTED,
        ("import resource\nresource.prlimit(0, resource.RLIMIT_CORE, (0, 0))\npwned()",),
        SECCOMP_LAYERS,
    ),
)
