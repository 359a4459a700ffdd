"""Skips the GPU tests, with a reason, on machines without a GPU; a process group for a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.distributed.world import connect, read_world


@pytest.fixture
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=120)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: this was NOT tested"))
