"""A Slurm cluster for the tests that submit jobs."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.slurm import Cluster, find_missing, start_cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Skipped where no cluster can be started, which is said loudly."""
    why = find_missing()
    if why:
        warnings.warn(f"no Slurm, its tests are skipped: {why}", stacklevel=1)
        pytest.skip(why)
    with start_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def tree(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like this repository's, to submit from: what jobs write stays out of ours."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "runs").mkdir()
    for name in ("launch", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder
