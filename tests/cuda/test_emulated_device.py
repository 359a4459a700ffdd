"""The code for GPUs on an emulated device, in a process of their own (tests/support/cuda).

One process runs tests/gpu, which is written for real GPUs, and tests/cuda/emulated.
"""

import pytest

from tests.support.cuda import launch
from tests.support.cuda.build import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no g++: the code for GPUs was NOT tested on an emulated device"),
    pytest.mark.timeout(1000),  # a minute on two idle cores
]
COMPILED_ONLY = [
    f"tests/gpu/test_fused_on_gpu.py::{name}" for name in ("test_logits_cost_what_the_plan_says", "test_the_activation_is_plain_torchs")
]
"""Compiled functions run uncompiled on the emulated device: they need more memory and round more
often.
"""
FULL_SIZE = "tests/gpu/test_memory_on_gpu.py"
"""Steps with 30,804 tokens take a minute here; tests/cuda/emulated/test_memory.py has the same
cases with 6,562 tokens.
"""
LEFT_OUT = [word for name in COMPILED_ONLY for word in ("--deselect", name)]


def test_the_tests_for_gpus_pass() -> None:
    """tests/gpu and tests/cuda/emulated share one process, because its imports take ten seconds."""
    launch.run_tests("tests/gpu", "tests/cuda/emulated", "-m", "not long", *LEFT_OUT, "--deselect", FULL_SIZE, timeout_s=900)


@pytest.mark.long
def test_steps_of_full_size_stay_below_the_plan() -> None:
    launch.run_tests(FULL_SIZE, timeout_s=900)


@pytest.mark.long
def test_the_tests_of_the_policy_pass() -> None:
    """Also those of tests/cuda/emulated that are marked long.

    Tests of plain torch functions, which put their inputs on the CPU, are left out.
    """
    on_cpu = [word for name in ("test_fused.py", "test_deepstack.py") for word in ("--ignore", f"tests/policy/{name}")]
    launch.run_tests(
        "tests/cuda/emulated", "tests/policy", "tests/parity/test_precision.py", "tests/parity/test_parts.py", *on_cpu, timeout_s=900
    )
