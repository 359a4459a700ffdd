"""What the tests of this room share."""

from pathlib import Path

import pytest

from tools.data.make_tiny_qwen2_5_vl import make_checkpoint


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of which none is as in random_model."""
    out = tmp_path_factory.mktemp("models") / "older"
    make_checkpoint(out, preset="nano", init="random", seed=5)
    return out
