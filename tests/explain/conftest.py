"""Shared fixtures of the explain tests."""

from pathlib import Path

import pytest

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint in which no tensor equals that of random_model."""
    out = tmp_path_factory.mktemp("models") / "older"
    make_checkpoint(out, preset="nano", init="random", seed=5)
    return out
