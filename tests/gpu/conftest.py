"""The packed example and Hugging Face's run of it are those of tests/parity."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: this was NOT tested"))
