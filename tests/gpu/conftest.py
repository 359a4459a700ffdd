"""Skips the GPU tests, with a reason, on machines without a GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: this was NOT tested"))
