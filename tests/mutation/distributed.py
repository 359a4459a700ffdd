"""Mutants of megatron_rl/distributed/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a rank is given up at its first silence",
        "megatron_rl/distributed/hang_watchdog.py",
        "MAX_MISSED_REPLIES = 3\n",
        "MAX_MISSED_REPLIES = 1\n",
        "tests/distributed/test_hang_watchdog.py -k silent",
    ),
    Mutant(
        "a rank without memory does not say so",
        "megatron_rl/distributed/hang_watchdog.py",
        "if isinstance(error, MemoryError):",
        "if error is MemoryError:",
        "tests/distributed/test_hang_watchdog.py -k memory",
    ),
    Mutant(
        "the limit of open files stays",
        "megatron_rl/distributed/world.py",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))",
        "pass",
        "tests/run/test_signals.py -k files",
    ),
    Mutant(
        "a rank whose disk hangs gives no answer",
        "megatron_rl/distributed/hang_watchdog.py",
        "            self._writer.join(STACK_WRITE_TIMEOUT_S)",
        "            self._writer.join()",
        "tests/distributed/test_hang_watchdog.py -k disk_that_hangs",
    ),
    Mutant(
        "a rank that reads answers gives none",
        "megatron_rl/distributed/hang_watchdog.py",
        "            self._answer_request()\n            asked",
        "            asked",
        "tests/distributed/test_hang_watchdog.py -k disk_that_hangs",
    ),
    Mutant(
        "who writes a checkpoint is taken for one who waits",
        "megatron_rl/distributed/hang_watchdog.py",
        ' and "/torch/distributed/checkpoint/" not in file',
        "",
        "tests/distributed/test_hang_watchdog.py -k writes_a_checkpoint",
    ),
    Mutant(
        "experts stay on the rank that sampled",
        "megatron_rl/distributed/image_exchange.py",
        "        context.routed_experts,\n    )\n",
        "        [],\n    )\n",
        "tests/distributed/test_image_exchange.py -k column",
    ),
)
