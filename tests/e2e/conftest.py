"""Fixtures that start a Slurm cluster for the tests that submit jobs."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.slurm import Cluster, find_missing, start_cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Start a Slurm cluster for the module's tests.

    If no cluster can be started, emit a warning and skip them.
    """
    why = find_missing()
    if why:
        warnings.warn(f"no Slurm, its tests are skipped: {why}", stacklevel=1)
        pytest.skip(why)
    with start_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def tree(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with this repository's layout to submit jobs from, so that jobs write nothing
    into the repository.
    """
    folder = tmp_path_factory.mktemp("tree")
    (folder / "runs").mkdir()
    for name in ("launch", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder
