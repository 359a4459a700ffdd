"""Limits on the pixels of a picture, in the files of a processor that transformers and vLLM read.

transformers 5 reads the part `image_processor` of processor_config.json, and preprocessor_config.json where there is none; older ones read
preprocessor_config.json alone. `size` has the limits as shortest_edge and longest_edge; min_pixels and max_pixels are their older names.
"""

import json
from pathlib import Path

from megatron_rl.io.jsonl import read_json

IMAGE_PROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


def read_pixel_limits(folder: Path) -> tuple[int, int] | None:
    """Return (min_pixels, max_pixels) as transformers reads them from a Hugging Face folder; None where it does not state both."""
    stored = _read(folder / PROCESSOR_FILE).get("image_processor") or _read(folder / IMAGE_PROCESSOR_FILE)
    size = stored.get("size") if isinstance(stored.get("size"), dict) else {}
    least = stored.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = stored.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return (least, most) if isinstance(least, int) and isinstance(most, int) else None


def write_pixel_limits(folder: Path, limits: tuple[int, int]) -> None:
    """Set (min_pixels, max_pixels) in the processor's files of a Hugging Face folder that was just written.

    Where processor_config.json alone has the image processor, preprocessor_config.json is added for older readers. A folder without a
    processor stays without one.
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


def _read(path: Path) -> dict[str, object]:
    """Return the content; empty where the file is missing or holds something else, which the reader of a model refuses."""
    try:
        found = read_json(path) if path.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
