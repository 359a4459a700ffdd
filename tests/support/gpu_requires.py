"""Writes the requirements of each pin of requirements/gpu.txt, taken from pip's own reports, to
tests/contracts/gpu_requires.json. Run by hand.

    grep -hoE '^[A-Za-z0-9_.-]+==[^ ]+' requirements/torch.txt requirements/gpu.txt >pins.txt
    pip install --dry-run --no-deps --ignore-installed --use-feature=fast-deps --report r.json -r pins.txt       # Python 3.11
    pip install --dry-run --no-deps --ignore-installed --use-feature=fast-deps --report t.json torch===2.13.0
    python -m tests.support.gpu_requires r.json t.json

No complete wheel is downloaded. The second report covers the CUDA build of torch, because pip may
prefer the CPU build (torch 2.13.0+cpu).
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVIRONMENT = {
    "python_version": "3.11", "python_full_version": "3.11.9", "implementation_name": "cpython", "os_name": "posix",
    "platform_python_implementation": "CPython", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64",
}  # fmt: skip
"""Marker environment of the machines for which the lock file is made."""
REQUIRES = Path(__file__).resolve().parents[1] / "contracts" / "gpu_requires.json"


def is_required(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Return True if the requirement applies in ENVIRONMENT to a package that is installed with
    these extras.
    """
    marker = requirement.marker
    return marker is None or any(marker.evaluate(ENVIRONMENT | {"extra": extra}) for extra in ("", *extras))


def requested_extras(requires: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the extras that other packages request of each package, including those requested by
    extras.
    """
    found: dict[str, set[str]] = {name: set() for name in requires}
    size = -1
    while size != (size := sum(map(len, found.values()))):
        for name, demands in requires.items():
            for requirement in map(Requirement, demands):
                if is_required(requirement, found[name]):
                    found.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="of pip; a later one is believed")
    read = [entry["metadata"] for path in parser.parse_args().reports for entry in json.loads(path.read_text())["install"]]
    known = {canonicalize_name(each["name"]): each for each in read}
    requires = {name: each.get("requires_dist") or [] for name, each in known.items()}
    extras = requested_extras(requires)
    rows = {}
    for name, each in sorted(known.items()):
        kept = sorted(text for text in requires[name] if is_required(Requirement(text), extras[name]))
        rows[f"{name}=={each['version']}"] = [f"python{each.get('requires_python') or ''}", *kept]
    lines = (f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in rows.items())
    REQUIRES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
