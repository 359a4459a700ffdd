"""Starts two real servers for all tests of this folder, and one run without servers for
comparison.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from tests.conftest import SUPPORT
from tests.support.vllm_servers import serve_engines


@pytest.fixture(scope="session")
def urls(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with serve_engines(random_model, tmp_path_factory.mktemp("servers"), num_servers=2) as urls:
        yield urls


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture(scope="session")
def colocated(random_model: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> Path:  # noqa: ANN001
    """Return the run directory of a server_engine_run.py run with a colocated engine."""
    folder = tmp_path_factory.mktemp("colocated") / "run"
    torchrun(1, SUPPORT / "server_engine_run.py", random_model, folder, timeout_s=280)
    return folder
