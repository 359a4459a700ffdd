"""Error messages for a model folder that does not exist or is no model.

The suggested commands come from the shipped recipes and scripts.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from huggingface_hub import snapshot_download

from megatron_rl.launcher.compose import compose_settings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_folder import find_config_file, resolve_hub_name
from tests.conftest import ROOT

EXPERIMENTS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs" / "experiment").glob("*.yaml")}


def error_of(folder: str) -> str:
    with pytest.raises(ValueError, match="^model.path=") as raised:
        find_config_file(folder, key="model.path")
    return str(raised.value)


def test_each_kind_has_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wrong folder has its own error, with the path that was searched and a fix."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    here = "relative paths start in the current directory"
    for folder, said in {
        "3b": f"no such folder (looked in {tmp_path}/3b); use a Hugging Face model folder; {here}",
        "/nowhere": "no such folder (looked in /nowhere); use a Hugging Face model folder",
        "empty": f"config.json is missing (looked in {tmp_path}/empty); use a Hugging Face model folder",
        "run": f"config.json is missing (looked in {tmp_path}/run); did you mean run/final?",
        "run/final/config.json": (
            f"is a file, not a folder ({tmp_path}/run/final/config.json); use the Hugging Face folder that contains the file"
        ),
        "run/nothing": f"no such folder (looked in {tmp_path}/run/nothing); use a Hugging Face model folder; {here}",
        "runs/mine": f"no such folder (looked in {tmp_path}/runs/mine); use a Hugging Face model folder; {here}",
        "Qwen/Qwen2.5-VL-3B-Instruct": (
            f"no such folder (looked in {tmp_path}/Qwen/Qwen2.5-VL-3B-Instruct); "
            "the Hugging Face cache has no such model either; download it: hf download Qwen/Qwen2.5-VL-3B-Instruct"
        ),
    }.items():
        assert error_of(folder) == f"model.path={folder}: {said}"
    assert find_config_file("run/final", key="model.path") == Path("run/final/config.json")


def test_the_first_command_of_the_readme_names_the_step_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model of the README's first recipe is missing, the error names the command that
    creates it."""
    monkeypatch.chdir(tmp_path)
    folder = EXPERIMENTS["numberline_grpo_cpu"]["model"]["path"]
    said = "create the folder with bash launch/quickstart.sh, or with python launch/train.py stage=sft experiment=numberline_sft_cpu"
    assert error_of(folder).endswith(said)
    assert error_of(EXPERIMENTS["numberline_sft_cpu"]["model"]["path"]).endswith("create the folder with bash launch/quickstart.sh")


def test_every_recipe_that_begins_with_anothers_result_says_whose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a recipe's model is the result of another recipe, the error for the missing folder names
    that recipe."""
    monkeypatch.chdir(tmp_path)
    results = {f"{recipe['run']['dir']}/final": name for name, recipe in EXPERIMENTS.items() if "dir" in recipe.get("run", {})}
    begun = [recipe["model"]["path"] for recipe in EXPERIMENTS.values() if recipe.get("model", {}).get("path") in results]
    assert len(begun) >= 6
    for folder in begun:
        assert f"experiment={results[folder]}" in error_of(folder) and f"(looked in {tmp_path}/{folder})" in error_of(folder)


def test_hub_names_are_found_in_the_cache(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the layout of the hub's cache is found by its name, without a network. A folder of
    that name and names that are not in the cache stay as they are.
    """
    repo = tmp_path / "hub" / "models--mine--tiny"
    shutil.copytree(random_model, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("megatron_rl.models.model_folder.snapshot_download", partial(snapshot_download, cache_dir=tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    settings = compose_settings(["task=number_line", "model.path=mine/tiny", "run.dir=run"])
    assert Path(settings.model.path) == repo / "snapshots" / "abc" and read_spec(settings.model.path).vocab_size > 0
    for name in ("mine/other", "3b", str(random_model), "a/b/c"):
        assert resolve_hub_name(name) == name
    (tmp_path / "mine" / "tiny").mkdir(parents=True)
    assert resolve_hub_name("mine/tiny") == "mine/tiny"
    served = compose_settings(["task=number_line", "model.path=mine/tiny2", "run.dir=run", "evaluation.urls=[http://h:1/v1]"])
    assert served.model.path == "mine/tiny2", "the name on a server"
