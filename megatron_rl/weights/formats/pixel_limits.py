"""Reads and writes the minimum and maximum pixels per image in a model's processor files.

In version 5, transformers reads the section `image_processor` of processor_config.json, or
preprocessor_config.json if that section is missing. Older versions read only
preprocessor_config.json. The field `size` contains the limits as shortest_edge and longest_edge,
both counted in pixels per image; older files use the fields min_pixels and max_pixels.
"""

import json
from pathlib import Path
from typing import Any

from megatron_rl.io.jsonl import read_json

IMAGE_PROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


def read_pixel_limits(folder: Path) -> tuple[int, int] | None:
    """Return (min_pixels, max_pixels) from a Hugging Face folder, as transformers reads them.

    Returns None unless the folder's files contain both limits.
    """
    stored = _read(folder / PROCESSOR_FILE).get("image_processor") or _read(folder / IMAGE_PROCESSOR_FILE)
    stated = stored.get("size")
    size = stated if isinstance(stated, dict) else {}
    least = stored.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = stored.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return (least, most) if isinstance(least, int) and isinstance(most, int) else None


def write_pixel_limits(folder: Path, limits: tuple[int, int]) -> None:
    """Set (min_pixels, max_pixels) in the processor files of a newly written Hugging Face folder.

    If only processor_config.json describes the image processor, preprocessor_config.json is added
    for older versions of transformers. A folder without a processor is left unchanged.
    """
    whole, images = _read(folder / PROCESSOR_FILE), _read(folder / IMAGE_PROCESSOR_FILE)
    part = whole.get("image_processor")
    if isinstance(part, dict):
        whole["image_processor"] = _with_limits(part, limits)
        _write(folder / PROCESSOR_FILE, whole)
        images = images or {**part, **{key: value for key, value in whole.items() if key == "processor_class"}}
    if images:
        _write(folder / IMAGE_PROCESSOR_FILE, {**_with_limits(images, limits), "min_pixels": limits[0], "max_pixels": limits[1]})


def _with_limits(stored: dict[str, object], limits: tuple[int, int]) -> dict[str, object]:
    least, most = limits
    older = {name: value for name, value in (("min_pixels", least), ("max_pixels", most)) if name in stored}
    return {**stored, "size": {"longest_edge": most, "shortest_edge": least}, **older}


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if the file is missing or contains no JSON object.

    Damaged files are ignored here, because loading the model rejects them.
    """
    try:
        found = read_json(path) if path.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
