"""Locates model folders and names the command that creates a missing folder."""

import re
from importlib.resources import files
from pathlib import Path

import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_rl import configs

LAUNCH_FOLDER = Path(__file__).resolve().parents[2] / "launch"
"""Folder launch/ of a checkout; does not exist in an installed wheel."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Pattern for model names on the Hugging Face hub, OWNER/NAME; folder paths can also match."""


def find_config_file(folder: str | Path, *, key: str) -> Path:
    """Return the path of config.json in a Hugging Face folder.

    Raises ValueError if config.json is missing; the message depends on whether the folder exists.
    """
    path, place = Path(folder) / "config.json", Path(folder).absolute()
    if path.is_file():
        return path
    if Path(folder).is_file():
        raise ValueError(f"{key}={folder}: is a file, not a folder ({place}); use the Hugging Face folder that contains the file")
    if Path(folder).is_dir():
        inner = next((each for each in ("final", "hf") if (path.parent / each / "config.json").is_file()), "")
        remedy = f"did you mean {Path(folder) / inner}?" if inner else "use a Hugging Face model folder"
        raise ValueError(f"{key}={folder}: config.json is missing (looked in {place}); {remedy}")
    raise ValueError(f"{key}={folder}: no such folder (looked in {place}); {_missing_folder_remedy(str(folder), key=key)}")


def resolve_hub_name(name: str) -> str:
    """Return the folder of a model in the local cache of the Hugging Face hub.

    Return `name` itself if it is a folder, is no hub name, or is not in the cache.
    """
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return name
    try:
        return snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError:
        return name


def _missing_folder_remedy(folder: str, *, key: str) -> str:
    recipes = _read_recipes()
    made = _find_maker(folder, recipes)
    if made:
        return f"relative paths start in the current directory; create the folder with {made}"
    own = {Path(folder).parts[:1] for recipe in recipes.values() for folder in (recipe.get("run", {}).get("dir", "."),)}
    if HUB_NAME.fullmatch(folder) and not Path(folder).parent.is_dir() and Path(folder).parts[:1] not in own:
        return f"the Hugging Face cache has no such model either; download it: hf download {folder}"
    return "use a Hugging Face model folder" + ("" if Path(folder).is_absolute() else "; relative paths start in the current directory")


def _read_recipes() -> dict[str, dict]:
    paths = [path for path in (files(configs) / "experiment").iterdir() if path.name.endswith(".yaml")]
    return {path.name.removesuffix(".yaml"): yaml.safe_load(path.read_text()) or {} for path in sorted(paths, key=lambda path: path.name)}


def _find_maker(folder: str, recipes: dict[str, dict]) -> str:
    """Return the commands that create a model folder, or '' if none is known.

    A command is either a script in launch/ or a run of the recipe that writes the folder. Example:
    for runs/quickstart/sft/final the result is
        bash launch/quickstart.sh,
        or with python launch/train.py stage=sft experiment=numberline_sft_cpu
    """
    wanted = Path(folder)
    makers = [name for name, recipe in recipes.items() if Path(recipe.get("run", {}).get("dir", ".")) / "final" == wanted]
    begun = makers or [name for name, recipe in recipes.items() if Path(recipe.get("model", {}).get("path", ".")) == wanted]
    scripts = [path.name for path in sorted(LAUNCH_FOLDER.glob("*.sh")) if _starts_recipe(path, begun)]
    commands = [f"bash launch/{name}" for name in scripts]
    for name in makers:
        stage = f"stage={recipes[name]['stage']} " if "stage" in recipes[name] else ""
        commands.append(f"python launch/train.py {stage}experiment={name}")
    return ", or with ".join(commands)


def _starts_recipe(script: Path, names: list[str]) -> bool:
    """Return True if a script starts a run of one of these recipes."""
    text = script.read_text()
    return any(re.search(rf"\bexperiment={name}\b", text) for name in names)
