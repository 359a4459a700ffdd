"""All places that unpickle data, in this project and in the libraries it uses. Files from others
are read by a table-driven unpickler.

A new place fails these tests until it is added to a list below together with what protects it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.io.bounded_files import _PlainLoader, _TextLoader
from tests.conftest import ROOT

PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Modules whose reading functions all unpickle."""
READING = {"load", "loads", "Unpickler", "_Unpickler", "open", "read_pickle"}
OURS = {
    "megatron_rl/rollout/colocated.py: pickle.loads": "bytes that a rank of this run sent, over the run's own process groups",
    "megatron_rl/distributed/world.py: pickle.loads": "the same, as torch's all_gather_object reads it",
    "megatron_rl/weights/formats/safe_unpickler.py: pickle._Unpickler": "the table's own unpickler: it calls nothing that the file names",
    "megatron_rl/rollout/vllm/client.py: numpy.load": "experts of tokens from a rollout server, with allow_pickle=False",
}
"""Unpickling in this project, with the source of the data."""
SITE = Path(torch.__file__).parents[1]
LIBRARIES = {
    "torch/distributed/checkpoint": {
        "filesystem.py: pickle.load": "read_metadata: torch_dist_load._Reader takes its place",
        "filesystem.py: torch.load": "read_data: torch_dist_load._Reader takes its place",
        "default_planner.py: torch.load": "load_bytes: _Reader refuses what is no tensor",
        "format_utils.py: torch.load": "programs that convert; nothing here calls them",
        "_experimental/checkpoint_reader.py: torch.load": "nothing here, and nothing of Megatron's, imports it",
        "_pg_transport.py: pickle.loads": "between processes of one job; nothing here calls it",
    },
    "megatron/core/dist_checkpointing": {
        "strategies/common.py: torch.load": "load_common: _NothingInCommon takes its place; load_sharded_objects: only of other backends",
    },
}
"""Unpickling that dist_checkpointing.load can reach (torch 2.13, megatron-core 0.16.1), with what
keeps it from files of others.
"""


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield `module.function` for every use of a function that unpickles: pickle's, torch.load,
    numpy.load, and YAML loaders that build objects.
    """
    aliases = {alias.asname or alias.name: alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES | {"torch", "numpy"}:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_reader(node.module, alias.name))
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            owner = aliases.get(owner, owner).removeprefix("msc.")
            if is_reader(owner, node.attr):
                yield f"{owner}.{node.attr}"


def is_reader(module: str, name: str) -> bool:
    if module in PICKLES:
        return name in READING
    if module == "yaml":
        return name in ("load", "unsafe_load", "full_load", "Loader", "UnsafeLoader", "FullLoader")
    return (module, name) in {("torch", "load"), ("numpy", "load"), ("pandas", "read_pickle"), ("torch.package", "PackageImporter")}


YAML_OF_OURS = {
    "megatron_rl/evaluation/results_directory.py", "megatron_rl/models/model_folder.py", "megatron_rl/entrypoints/rescore.py",
    "megatron_rl/rewards/judge_prompt.py", "megatron_rl/run/directory.py",
}  # fmt: skip
"""Modules that read YAML files of the package or files that they have just written."""


def found_in(folder: Path, root: Path) -> set[str]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    return {f"{path.relative_to(root)}: {name}" for path, tree in trees.items() for name in names_in(tree)}


@pytest.mark.parametrize(
    "text",
    ["import pickle as p\np.loads(b)", "from pickle import Unpickler", "import torch\ntorch.load(f, weights_only=True)",
     "import numpy as np\nnp.load(f)", "from torch import load", "import yaml\nyaml.unsafe_load(f)", "import dill\nread = dill.load"],
)  # fmt: skip
def test_each_way_to_unpickle_is_seen(text: str) -> None:
    assert list(names_in(ast.parse(text)))


def test_what_is_harmless_is_not() -> None:
    assert not list(names_in(ast.parse("import json, pickle, yaml\njson.load(f); pickle.dump(a, f); yaml.safe_load(f)")))


def test_ours_are_those_of_the_list() -> None:
    """This test excludes yaml.load, which always has a Loader that derives from SafeLoader: see
    test_yaml_builds_no_objects.
    """
    found = set().union(*(found_in(ROOT / room, ROOT) for room in ("megatron_rl", "tools", "launch", "sandbox")))
    assert {name for name in found if not name.endswith(": yaml.load")} == OURS.keys()


def test_yaml_builds_no_objects() -> None:
    """Only io/bounded_files.py reads YAML files of others. yaml.safe_load, which expands aliases,
    reads only files that this program wrote.
    """
    assert issubclass(_PlainLoader, yaml.SafeLoader) and issubclass(_TextLoader, yaml.BaseLoader)
    callers: dict[str, set[str]] = {"yaml.load": set(), "yaml.safe_load": set()}
    for room in ("megatron_rl", "tools", "launch", "sandbox"):
        for path in (ROOT / room).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "yaml.load":
                    (loader,) = (each.value for each in call.keywords if each.arg == "Loader")
                    assert ast.unparse(loader) == "_TextLoader if as_text else _PlainLoader", path
                callers.get(ast.unparse(call.func), set()).add(str(path.relative_to(ROOT)))
    assert callers == {"yaml.load": {"megatron_rl/io/bounded_files.py"}, "yaml.safe_load": YAML_OF_OURS}


@pytest.mark.parametrize("room", LIBRARIES)
def test_the_libraries_are_those_of_the_list(room: str) -> None:
    """A new version of torch or Megatron that unpickles in other places must be reviewed before it
    is used.
    """
    assert found_in(SITE / room, SITE / room) == LIBRARIES[room].keys()


def test_remote_code_is_never_trusted() -> None:
    """Every AutoX.from_pretrained call passes trust_remote_code=False. A model folder may name
    Python files to run; without that argument, transformers asks in the terminal whether to run
    them.
    """
    loads = []
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            trusted = [ast.unparse(each.value) for each in call.keywords if each.arg == "trust_remote_code"]
            if ast.unparse(call.func).startswith("Auto") and ast.unparse(call.func).endswith(".from_pretrained"):
                loads.append(trusted)
            assert trusted in ([], ["False"]), path
    assert loads and all(trusted == ["False"] for trusted in loads)
