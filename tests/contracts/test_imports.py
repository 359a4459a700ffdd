"""Who may import whom, read from the source; and what a fresh interpreter has loaded after importing a room."""

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
DATA = {"types", "config", "world", "bounded_files"}
MAY_IMPORT = {
    "types": set(),
    "config": set(),
    "world": {"types"},
    "gpus": DATA,
    "histogram": set(),
    "cpu": set(),
    "bounded_files": set(),
    "jsonl": {"bounded_files"},
    "wire": {"jsonl", "types"},
    "torchvision_on_cpu": set(),
    "servers": {"types"},
    "proxies": set(),
    "algo": {"histogram", "types", "config"},
    "minibatches": DATA,
    "batch": {"minibatches", *DATA},
    "gallery": DATA,
    "noted": {"algo", "batch", *DATA},
    "rewards": {"data", "proxies", "servers", "types", "config"},
    "published": {"data", "types", "config"},
    "tasks": {"bounded_files", "data", "jsonl", "published", "rewards", "types", "config"},
    "data": {"bounded_files", "jsonl", "types", "config"},
    "observe": {"bounded_files", "jsonl", "wire", "types", "config"},
    "rollout": {"tasks", "rewards", "jsonl", "models", "servers", *DATA},
    "models": {"configs", "jsonl", "types", "cpu"},
    "weights": {"bounded_files", "jsonl", "models", "cpu"},
    "policy": {"weights", "models", "cpu", "batch", "histogram", "minibatches", *DATA},
    "plan": {"algo", "minibatches", "policy", "models", "weights", "cpu", *DATA},
    "step_metrics": {"algo", *DATA},
    "run_superseded": {"bounded_files", "jsonl", "observe"},
    "run": {"observe", "jsonl", "run_superseded", "step_metrics", *DATA},
    "run_checks": {"step_metrics", *DATA},
    "evaluate": {"rollout", "run", "run_checks", "step_metrics", "tasks", *DATA},
    "checkpoint_state": {"jsonl", "run", "weights"},
    "run_states": {"checkpoint_state", "policy", "run", "run_superseded", "weights", *DATA},
    "run_folder": {"checkpoint_state", "jsonl", "observe", "run", "run_superseded", "weights", *DATA},
    "stop": {"types"},
    "watch": {"types", "world"},
    "nodes": {"run", *DATA},
    "services": {"data", "jsonl", "models", "rewards", "rollout", "servers", "stop", *DATA},
    "attempts": {"bounded_files", "stop"},
    "run_seen": {"attempts", "bounded_files", "jsonl", "observe", "run", "run_folder", "weights"},
    "sweeps": {"bounded_files", "config"},
    "sft": {"algo", "data", "minibatches", "run_states", "policy", "rollout", "run", "stop", "tasks", *DATA},
    "train": {
        "algo", "batch", "evaluate", "gallery", "minibatches", "noted", "policy", "recorded", "rollout", "run", "run_checks",
        "run_states", "step_metrics", "stop", "tasks", *DATA,
    },
    "model_card": {"bounded_files", "models", "config"},
    "choices": {"algo", "models", "policy", "rewards", "tasks", "weights", *DATA},
    "cli": {
        "algo", "attempts", "choices", "configs", "data", "evaluation", "explain", "gpus", "jsonl", "models", "nodes", "observe", "plan",
        "policy", "published", "recorded", "rewards", "rollout", "run", "run_folder", "run_seen", "services", "start", "stop", "sweeps",
        "tasks", "weights", *DATA,
    },
    "opening": {"data", "rollout", *DATA},
    "parts": {"algo", "gallery", "policy", "rollout", "stop", "tasks", *DATA},
    "recorded": {
        "algo", "choices", "data", "gallery", "jsonl", "models", "observe", "opening", "parts", "published", "rewards", "rollout", "run",
        "run_folder", "services", "step_metrics", "stop", "tasks", "train", "weights", *DATA,
    },
    "stages": {
        "algo", "gallery", "opening", "parts", "policy", "recorded", "rollout", "run", "run_states", "sft", "stop", "tasks", "train", *DATA,
    },
    "start": {
        "algo", "checkpoint_state", "choices", "evaluate", "gallery", "gpus", "model_card", "models", "nodes", "observe", "parts", "plan",
        "policy", "recorded", "rollout", "run", "run_checks", "run_folder", "run_states", "services", "stages", "stop", "tasks", "watch",
        "weights", *DATA,
    },
    "explain": {
        "batch", "cpu", "evaluation", "jsonl", "minibatches", "models", "observe", "policy", "rollout", "run", "run_folder", "weights",
        "wire", *DATA,
    },
    "evaluation": {
        "choices", "evaluate", "gallery", "jsonl", "models", "observe", "opening", "parts", "published", "rewards", "rollout", "run",
        "run_folder", "servers", "services", "start", "stop", "tasks", "watch", "weights", *DATA,
    },
}  # fmt: skip
"""Nothing points back up, and rollout and policy know nothing of each other: they meet in parts, train, sft and stages."""
DOORS = {"vllm": ("rollout/vllm/",), "megatron": ("policy/", "plan/", "weights/", "compat/megatron_cpu.py")}
HEAVY = ["vllm", "megatron"]
OF_SERVERS = PACKAGE / "rollout" / "vllm" / "served.py"
"""What a server of vLLM imports, and nobody else."""
OF_GAMES = set() if find_spec("fast_downward") else {PACKAGE / "tasks" / "alfworld" / "engine.py"}
"""What cannot be imported without launch/install_alfworld.sh."""
NEVER_LOADS = {
    "config": [*HEAVY, "torch", "transformers"],
    "sweeps": [*HEAVY, "torch", "transformers"],
    "servers": [*HEAVY, "torch", "transformers", "openai"],
    "rewards": [*HEAVY, "torch", "transformers"],
    "tasks": [*HEAVY, "torch", "transformers"],
    "data": [*HEAVY, "torch", "transformers"],
    "published": [*HEAVY, "torch", "transformers"],
    "types": [*HEAVY, "transformers"],
    "algo": [*HEAVY, "transformers"],
    "observe": [*HEAVY, "transformers", "tensorboard", "wandb"],
    "run": [*HEAVY, "tensorboard", "wandb", "matplotlib"],
    "run_seen": [*HEAVY, "tensorboard", "wandb", "matplotlib"],
    "rollout": HEAVY,
    "services": ["vllm"],
    "models": HEAVY,
    "weights": ["vllm"],
    "plan": ["vllm"],
    "policy": ["vllm"],
    "start": ["vllm"],
    "evaluation": ["vllm"],
    "explain": ["vllm"],
}


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]


def imported(path: Path) -> set[str]:
    """Dotted names of every module that a file imports anywhere, be it in a function or for type checking only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_has_its_rule() -> None:
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert rooms - {"__init__", "configs"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below(room: str) -> None:
    used = {name.split(".")[1] for path in files_of(room) for name in imported(path) if name.startswith("megatron_rl.")}
    assert used - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("library", DOORS)
def test_a_heavy_library_has_its_doors(library: str) -> None:
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(name.split(".")[0] == library for name in imported(path))
    }
    assert users, "the check has lost its object"
    assert not {user for user in users if not user.startswith(DOORS[library])}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_known_by_name_in_models_alone(model_type: str) -> None:
    """Neither transformers' classes nor the key: whoever needs to know something of a family is handed a ModelSpec. Where vLLM's and
    transformers' files lie is no family: pictures of all of them are cut by Qwen2-VL's processor."""
    files = [path for folder in ("megatron_rl", "launch", "tools/convert") for path in (ROOT / folder).rglob("*.py")]
    shared = re.compile(r"\S*(model_executor/models/qwen2_vl\.py|models\.qwen2_vl\.image_processing_qwen2_vl)\S*")
    knowing = {path for path in files if model_type in shared.sub("", path.read_text().lower())}
    assert PACKAGE / "models" / "family.py" in knowing, "the check has lost its object"
    assert not {path for path in knowing if path.parent != PACKAGE / "models"}


def test_ranks_meet_in_the_local_engine_alone() -> None:
    """A fleet and its episodes work without a process group; what gathers over ranks is handed to them. The other groups are those of the
    trainer and a server."""
    users = {path.name for path in files_of("rollout") if any(name.startswith("torch.distributed") for name in imported(path))}
    assert users == {"local.py", "transfer.py"}


def test_what_a_server_imports_no_room_does() -> None:
    assert any(name.startswith("vllm.") for name in imported(OF_SERVERS)), "the check has lost its object"
    assert not [
        path
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("megatron_rl.rollout.vllm.worker_extension") for name in imported(path))
    ]


def test_hydra_ends_at_the_door() -> None:
    for path in (path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "cli"):
        names = imported(path)
        assert not any(name.startswith(("hydra", "megatron_rl.cli")) for name in names), path
        assert not any(name.startswith("omegaconf") and name != "omegaconf.MISSING" for name in names), path


def test_the_package_stands_without_the_folders_beside_it() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] in ("launch", "tools", "tests", "configs") for name in imported(path)), path


def chains() -> list[list[str]]:
    """The rooms in rows, each of which may load whatever the one before it may: one interpreter can import a row room by room."""
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
    """{room: what fresh interpreters have in sys.modules once all of its files, and those of rooms with stricter rules, are imported}."""
    found: dict[str, set[str]] = {}
    interpreters = []
    for row in chains():
        modules = {
            room: [
                ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                for path in files_of(room)
                if path not in {OF_SERVERS, *OF_GAMES}
            ]
            for room in row
        }
        lines = [f"import {', '.join(names)}, json, sys; print(json.dumps([{room!r}, *sys.modules]))" for room, names in modules.items()]
        command = [sys.executable, "-c", "\n".join(lines)]
        interpreters.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for interpreter in interpreters:
        said, wrong = interpreter.communicate(timeout=240)
        assert interpreter.returncode == 0, wrong
        for room, *names in map(json.loads, said.splitlines()):
            found[room] = set(names)
    return found


@pytest.mark.parametrize("room", NEVER_LOADS)
def test_a_fresh_interpreter_does_not_load(room: str, loaded: dict[str, set[str]]) -> None:
    """Importing all of a room's files leaves these libraries, whoever may pull them in, out of sys.modules."""
    assert f"megatron_rl.{room}" in loaded[room]
    assert not set(NEVER_LOADS[room]) & loaded[room]


def test_what_is_loaded_is_seen(loaded: dict[str, set[str]]) -> None:
    """The last rooms of the rows need what the first ones must not load."""
    assert {"torch", "transformers", "megatron"} <= loaded["start"]
    assert sorted(room for row in chains() for room in row) == sorted(NEVER_LOADS)


def test_the_sandbox_stands_alone() -> None:
    """It knows nothing of the trainer, and no process of it ever loads torch."""
    for path in (ROOT / "sandbox").rglob("*.py"):
        names = imported(path)
        assert not {name.split(".")[0] for name in names} & {"megatron_rl", "torch", "transformers", "hydra", "launch", "tools"}, path
    code = "import sandbox.worker, sys; sandbox.worker.warm_up(); print(*sorted({'sys', 'torch', 'megatron_rl'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.split() == ["sys"], result.stdout + result.stderr
