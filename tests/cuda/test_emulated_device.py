"""The code for GPUs on an emulated device, in processes of their own (tests/support/cuda).

One process runs tests/gpu, which is written for real GPUs, and one runs tests/cuda/emulated.
"""

import pytest

from tests.support.cuda import launch
from tests.support.cuda.build import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no g++: the code for GPUs was NOT tested on an emulated device"),
    pytest.mark.timeout(1000),  # a minute on two idle cores
]
FUSED_ONLY = "tests/gpu/test_fused_on_gpu.py::test_logits_cost_what_the_plan_says"
"""Compiled functions run uncompiled on the emulated device, and need more memory."""


def test_the_tests_for_gpus_pass() -> None:
    launch.run_tests("tests/gpu", "--deselect", FUSED_ONLY, timeout_s=900)


def test_training_and_waits_on_one_device() -> None:
    launch.run_tests("tests/cuda/emulated", "-m", "not long", timeout_s=900)


@pytest.mark.long
def test_the_tests_of_the_policy_pass() -> None:
    """Also those of tests/cuda/emulated that are marked long.

    Tests of plain torch functions, which put their inputs on the CPU, are left out.
    """
    on_cpu = [word for name in ("test_fused.py", "test_deepstack.py") for word in ("--ignore", f"tests/policy/{name}")]
    launch.run_tests(
        "tests/cuda/emulated", "tests/policy", "tests/parity/test_precision.py", "tests/parity/test_parts.py", *on_cpu, timeout_s=900
    )
