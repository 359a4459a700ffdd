"""Model card (README.md) of a trained model: base model, training, metrics and usage."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config import Settings
from megatron_rl.io.bounded_files import parse_yaml, read_bytes
from megatron_rl.models.known_models import HUB_IDS

GROUPS = ("algo", "batch", "filter", "optim", "critic", "sft", "lora", "model", "task")
"""Groups of settings that affect the trained model and are listed in the card. The other groups
configure machines and services.
"""
PRIVATE = ("url", "token_file", "path", "log", "image_roots")
"""Substrings of setting names. Settings with such names are not listed in the card, because the
values contain names of machines or folders.
"""
PACKAGES = ("megatron-rl", "megatron-core", "torch", "transformers", "vllm")
"""Packages that are listed in the card with their versions."""
LICENSE = ("license", "license_name", "license_link")
"""License metadata keys that are copied from the base model's card."""
MAX_README_BYTES = 1 << 20
"""Maximum size in bytes of the base model's README.md."""


def make_model_card(settings: Settings, *, metrics: Mapping[str, float], num_steps: int, folder: Path) -> str:
    """Return the text of the model card for the model in `folder`."""
    base, metadata = Path(settings.model.path), _metadata_of(Path(settings.model.path))
    name = _base_name(base, metadata)
    is_rl = settings.stage == "rl"
    method = settings.algo.name if is_rl else "sft"
    front = {
        "base_model": name, **{key: metadata[key] for key in LICENSE if key in metadata}, "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["megatron-rl", "reinforcement-learning" if is_rl else "supervised-fine-tuning", method],
    }  # fmt: skip
    data = settings.task.data
    files = [("training", data.train), ("evaluation", data.eval), ("demonstrations", data.demonstrations)]
    lines = [
        "---", yaml.safe_dump(front, sort_keys=False).rstrip(), "---", "", f"# {folder.absolute().parent.name}", "",
        f"{name}, trained for {num_steps} steps with megatron-rl (stage {settings.stage}, {method}, task {settings.task.name}).", "",
        "## Use", "",
        f"Images are resized to between {settings.model.min_pixels} and {settings.model.max_pixels} pixels, as in training;",
        "the processor's files set these limits. Serve the model with vLLM:", "", "```bash",
        "python -m vllm.entrypoints.openai.api_server --model PATH_OF_THIS_FOLDER", "```", "",
        "Or load it with transformers:", "", "```python", "from transformers import AutoModelForImageTextToText, AutoProcessor", "",
        'model = AutoModelForImageTextToText.from_pretrained("PATH_OF_THIS_FOLDER")',
        'processor = AutoProcessor.from_pretrained("PATH_OF_THIS_FOLDER")', "```", "",
        "## Data", "", *([f"- {kind}: {', '.join(names)}" for kind, names in files if names] or ["The task creates its own examples."]), "",
        "## Settings", "", "Settings that differ from the defaults of megatron-rl:", "", "```yaml", *_changes(settings), "```", "",
        "## Metrics", "",
        *([f"- {key}: {value:.6g}" for key, value in sorted(metrics.items())] or ["The run made no final evaluation."]), "",
        "## Versions", "", *(f"- {package} {found}" for package, found in _versions()), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _metadata_of(base: Path) -> dict[str, object]:
    """Return the metadata in the base model's card; empty without a valid card."""
    try:
        _, _, rest = read_bytes(base / "README.md", at_most=MAX_README_BYTES).decode(errors="replace").partition("---\n")
        head, end, _ = rest.partition("\n---")
        found = parse_yaml(head) if end else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _base_name(base: Path, metadata: Mapping[str, object]) -> str:
    """Return the base model's name on the Hugging Face Hub if known, else the folder's name."""
    released = {hub.partition("/")[2]: hub for hub in HUB_IDS}
    for part in reversed(base.absolute().parts):
        name = part.rpartition("--")[2]  # folders in the Hub's cache are named models--Qwen--NAME
        if name in released:
            return released[name]
    stated = metadata.get("base_model")
    return stated if isinstance(stated, str) else base.absolute().name


def _changes(settings: Settings) -> Iterator[str]:
    for group in GROUPS:
        yield from (f"{group}.{key}: {value}" for key, value in _differing(getattr(settings, group)))


def _differing(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in fields(settings):
        value = getattr(settings, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if any(word in field.name for word in PRIVATE) or value == default:
            continue
        if is_dataclass(value):
            yield from _differing(value, f"{prefix}{field.name}.")
        elif field.name == "mcp":  # programs and addresses are private
            yield prefix + field.name, ", ".join(server.name for server in value)
        else:
            yield prefix + field.name, yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").rstrip()


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # not installed; for example vLLM, if engines run on other machines
            continue
