"""Import rules between packages: checked in the source, and by what a fresh interpreter has loaded
after importing a package.
"""

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.models.family import FAMILIES
from tests.conftest import ROOT

PACKAGE = ROOT / "megatron_rl"
MAY_IMPORT = {
    "config": set(),
    "types": set(),
    "dtypes": {"config"},
    "io": {"types"},
    "algo": {"config", "types", "io"},
    "errors": set(),
    "supervisor": set(),
    "distributed": {"types", "errors"},
    "callbacks": {"distributed"},
    "batching": {"config", "types", "algo", "distributed"},
    "data": {"config", "types", "io", "errors"},
    "observe": {"config", "types", "io", "algo"},
    "configs": set(),
    "models": {"types", "io", "configs"},
    "weights": {"io", "models"},
    "compat": set(),
    "policy": {"config", "dtypes", "types", "io", "errors", "distributed", "batching", "models", "weights", "compat"},
    "clients": {"config", "errors"},
    "rewards": {"config", "types", "errors", "data", "clients"},
    "rollout": {"config", "dtypes", "types", "io", "errors", "distributed", "data", "observe", "models", "compat", "clients", "rewards"},
    "tasks": {"config", "types", "io", "errors", "data", "models", "clients", "rewards", "rollout", "supervisor"},
    "registry": {"config", "algo", "callbacks", "rewards", "rollout", "tasks"},
    "run": {"config", "types", "io", "errors", "distributed", "callbacks", "observe", "models", "weights", "policy"},
    "build": {"config", "algo", "distributed", "batching", "data", "observe", "weights", "policy", "rollout", "registry", "run"},
    "evaluation": {"config", "types", "io", "distributed", "data", "observe", "clients", "rollout", "run"},
    "export": {"types", "io", "data", "observe", "rollout"},
    "explain": {
        "config", "dtypes", "types", "io", "distributed", "batching", "observe", "models", "weights", "compat", "policy",
        "rollout", "run", "evaluation",
    },
    "services": {"config", "io", "supervisor", "distributed", "clients", "rollout", "run"},
    "memory_plan": {"config", "dtypes", "algo", "batching", "models", "compat", "policy"},
    "preflight": {
        "config", "dtypes", "types", "io", "algo", "errors", "distributed", "data", "observe", "models", "weights", "policy",
        "batching", "clients", "rewards", "rollout", "registry", "run", "services", "memory_plan",
    },
    "training_batch": {"config", "types", "algo", "batching", "policy"},
    "training_loop": {
        "config", "types", "algo", "distributed", "batching", "observe", "policy", "rollout", "run", "evaluation",
        "training_batch",
    },
    "sft": {"config", "types", "algo", "batching", "data", "policy", "rollout", "run"},
    "entrypoints": {
        "config", "dtypes", "types", "io", "algo", "errors", "distributed", "data", "observe", "models", "weights", "rewards",
        "rollout", "registry", "run", "build", "evaluation", "export", "services", "preflight", "training_loop",
        "sft",
    },
    "cli": {
        "config", "io", "errors", "distributed", "observe", "configs", "models", "compat", "rollout", "registry", "run",
        "evaluation", "export", "explain", "services", "preflight", "entrypoints",
    },
    "launcher": {"config", "io", "distributed", "observe", "run", "evaluation", "cli"},
    "api": {"config", "io", "algo", "callbacks", "compat", "rollout", "registry", "run", "entrypoints", "cli", "launcher"},
    "__main__": {"io", "models", "compat", "observe", "cli", "launcher"},
}  # fmt: skip
"""Allowed imports between top-level packages, in layer order, lowest first. rollout and policy
never import each other.
"""
LIBRARY_FOLDERS = {"vllm": ("rollout/vllm/",), "megatron": ("policy/", "memory_plan/", "weights/", "compat/")}
HEAVY = ["vllm", "megatron"]
WORKER_EXTENSION = PACKAGE / "rollout" / "vllm" / "worker_extension.py"
"""The module that vLLM servers import; no other module may import it."""
RECORDER = PACKAGE / "rollout" / "vllm" / "routed_experts.py"
"""Subclasses of vLLM's classes, which vLLM imports by name; an engine that records experts imports
them when it starts.
"""
OF_GAMES = set() if find_spec("fast_downward") else {PACKAGE / "tasks" / "alfworld" / "textworld_engine.py"}
"""Files that cannot be imported without launch/install_alfworld.sh."""
NEVER_LOADS = {
    "config": [*HEAVY, "torch", "transformers"],
    "launcher.sweep_file": [*HEAVY, "torch", "transformers"],
    "clients.endpoint_pool": [*HEAVY, "torch", "transformers", "openai"],
    "rewards": [*HEAVY, "torch", "transformers"],
    "data": [*HEAVY, "torch", "transformers"],
    "rollout.task": [*HEAVY, "torch", "transformers"],
    "tasks.agent": [*HEAVY, "torch", "transformers"],
    "tasks.gym_cards": [*HEAVY, "torch", "transformers"],
    "tasks.visual_python": [*HEAVY, "torch", "transformers"],
    "tasks.vqa": [*HEAVY, "torch", "transformers"],
    "types": [*HEAVY, "transformers"],
    "algo": [*HEAVY, "transformers"],
    "observe": [*HEAVY, "transformers", "tensorboard", "wandb"],
    "run.record": [*HEAVY, "tensorboard", "wandb", "matplotlib"],
    "run.status": [*HEAVY, "tensorboard", "wandb", "matplotlib"],
    "rollout": HEAVY,
    "services": ["vllm"],
    "models": HEAVY,
    "weights": ["vllm"],
    "memory_plan": ["vllm"],
    "policy": ["vllm"],
    "entrypoints": ["vllm"],
    "explain": ["vllm"],
}


def files_of(room: str) -> list[Path]:
    path = PACKAGE / room.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, including imports within
    functions and for type checking only.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_has_its_rule() -> None:
    """Every top-level module and package has an entry in MAY_IMPORT."""
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert rooms - {"__init__"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below(room: str) -> None:
    """A package imports only the packages that MAY_IMPORT allows."""
    used = {name.split(".")[1] for path in files_of(room) for name in imported(path) if name.startswith("megatron_rl.")}
    assert used - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("library", LIBRARY_FOLDERS)
def test_a_heavy_library_has_its_doors(library: str) -> None:
    """vllm and megatron are imported only in the folders of LIBRARY_FOLDERS."""
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(name.split(".")[0] == library for name in imported(path))
    }
    assert users, "the check has lost its object"
    assert not {user for user in users if not user.startswith(LIBRARY_FOLDERS[library])}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_known_by_name_in_models_alone(model_type: str) -> None:
    """Only models/ contains the name of a model family, be it in a class name of transformers or as
    a key; other modules use a ModelSpec. Paths of the Qwen2-VL files in vLLM and transformers are
    exempt, because the Qwen2-VL processor splits the images of all families.
    """
    files = [path for folder in ("megatron_rl", "launch", "tools/convert") for path in (ROOT / folder).rglob("*.py")]
    shared = re.compile(r"\S*(model_executor/models/qwen2_vl\.py|models\.qwen2_vl\.image_processing_qwen2_vl)\S*")
    knowing = {path for path in files if model_type in shared.sub("", path.read_text().lower())}
    assert PACKAGE / "models" / "family.py" in knowing, "the check has lost its object"
    assert not {path for path in knowing if path.parent != PACKAGE / "models"}


def test_ranks_meet_in_the_local_engine_alone() -> None:
    """Only colocated.py and weight_transport.py use torch.distributed within rollout/. The rollout
    manager and its episodes need no process group: functions that gather over ranks are passed in.
    The other process groups connect the trainer and a server.
    """
    users = {path.name for path in files_of("rollout") if any(name.startswith("torch.distributed") for name in imported(path))}
    assert users == {"colocated.py", "weight_transport.py"}


def test_what_a_server_imports_no_room_does() -> None:
    """No module of the package imports worker_extension.py, which only vLLM servers load."""
    assert any(name.startswith("vllm.") for name in imported(WORKER_EXTENSION)), "the check has lost its object"
    assert not [
        path
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("megatron_rl.rollout.vllm.worker_extension") for name in imported(path))
    ]


def test_no_import_points_upwards(capsys: pytest.CaptureFixture[str]) -> None:
    """No package imports one that comes later in MAY_IMPORT, that is, in a higher layer."""
    order = list(MAY_IMPORT)
    pairs = {
        (room, name.split(".")[1])
        for room in order
        for path in files_of(room)
        for name in imported(path)
        if name.startswith("megatron_rl.")
    }
    between = {(user, used) for user, used in pairs if user != used}
    upwards = sorted(f"{user} -> {used}" for user, used in between if order.index(used) > order.index(user))
    with capsys.disabled():
        print(f"\n{len(order)} top-level modules, {len(between)} imports between them, {len(upwards)} upwards")
    assert not upwards


def test_tasks_are_imported_by_the_registry() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "tasks" and any(name.startswith("megatron_rl.tasks.") for name in imported(path))
    }
    assert users == {"registry.py"}


def test_hydra_stays_in_the_command_line() -> None:
    allowed = (PACKAGE / "cli", PACKAGE / "launcher", PACKAGE / "__main__.py", PACKAGE / "api.py")
    for path in (path for path in PACKAGE.rglob("*.py") if not {path, path.parent} & {*allowed}):
        names = imported(path)
        assert not any(name.startswith(("hydra", "megatron_rl.cli.")) for name in names), path
        assert not any(name.startswith("omegaconf") and name != "omegaconf.MISSING" for name in names), path


def test_the_package_stands_without_the_folders_beside_it() -> None:
    """Only the command `megatron-rl` imports tools/, and nothing imports launch/, tests/ or
    configs/.
    """
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__main__.py":
            continue
        assert not any(name.split(".")[0] in ("launch", "tools", "megatron_rl_tools", "tests", "configs") for name in imported(path)), path


def chains() -> list[list[str]]:
    """Arrange the packages in rows in which each package may load everything that the one before it
    may load. One interpreter can then import a row package by package.
    """
    rows: list[list[str]] = []
    for room in sorted(NEVER_LOADS, key=lambda room: -len(NEVER_LOADS[room])):
        fitting = [row for row in rows if set(NEVER_LOADS[row[-1]]) >= set(NEVER_LOADS[room])]
        if fitting:
            fitting[0].append(room)
        else:
            rows.append([room])
    return rows


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return {package: contents of sys.modules after importing all its files}. A fresh interpreter
    per row imports the packages with stricter rules first.
    """
    found: dict[str, set[str]] = {}
    interpreters = []
    for row in chains():
        modules = {
            room: [
                ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                for path in files_of(room)
                if path not in {WORKER_EXTENSION, RECORDER, *OF_GAMES}
            ]
            for room in row
        }
        lines = [f"import {', '.join(names)}, json, sys; print(json.dumps([{room!r}, *sys.modules]))" for room, names in modules.items()]
        command = [sys.executable, "-c", "\n".join(["import gc; gc.disable()", *lines])]  # a quarter of the time of imports
        interpreters.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for interpreter in interpreters:
        said, wrong = interpreter.communicate(timeout=240)
        assert interpreter.returncode == 0, wrong
        for room, *names in map(json.loads, said.splitlines()):
            found[room] = set(names)
    return found


@pytest.mark.parametrize("room", NEVER_LOADS)
def test_a_fresh_interpreter_does_not_load(room: str, loaded: dict[str, set[str]]) -> None:
    """Importing all files of a package leaves these libraries out of sys.modules, including
    indirect imports.
    """
    assert f"megatron_rl.{room}" in loaded[room]
    assert not set(NEVER_LOADS[room]) & loaded[room]


def test_what_is_loaded_is_seen(loaded: dict[str, set[str]]) -> None:
    """The packages at the end of the rows load the libraries that the first ones must not load, so
    the check can fail.
    """
    assert {"torch", "transformers", "megatron"} <= loaded["entrypoints"]
    assert sorted(room for row in chains() for room in row) == sorted(NEVER_LOADS)


def test_the_sandbox_stands_alone() -> None:
    """sandbox/ imports nothing from the trainer, and its worker processes never load torch."""
    for path in (ROOT / "sandbox").rglob("*.py"):
        names = imported(path)
        assert not {name.split(".")[0] for name in names} & {
            "megatron_rl",
            "torch",
            "transformers",
            "hydra",
            "launch",
            "tools",
            "megatron_rl_tools",
        }, path
    loads = "import megatron_rl_sandbox.worker, sys; megatron_rl_sandbox.worker.preload_libraries()"
    code = f"{loads}; print(*sorted({{'sys', 'torch', 'megatron_rl'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.split() == ["sys"], result.stdout + result.stderr
