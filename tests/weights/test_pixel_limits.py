"""Pixel limits of images in written model folders, against the grids that transformers' processor
computes."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from megatron_rl.weights.formats.pixel_limits import read_pixel_limits, write_pixel_limits
from megatron_rl.weights.formats.tensor_files import copy_companions

LIMITS = (40_000, 48_000)
SIZES = ((100, 80), (150, 100), (300, 900), (640, 480))


def forms(model: Path) -> dict[str, dict[str, dict]]:
    """Return the processor files as written by several transformers versions, with other limits."""
    whole = json.loads((model / "processor_config.json").read_text())
    part = whole["image_processor"]
    plain = {key: value for key, value in part.items() if key != "size"}
    return {
        "5.19": {"processor_config.json": whole},
        "4.57": {"preprocessor_config.json": {**part, "size": {"shortest_edge": 3136, "longest_edge": 9000}}},
        "4.49": {"preprocessor_config.json": {**plain, "min_pixels": 3136, "max_pixels": 12_845_056}},
        "4.45": {"preprocessor_config.json": {**plain, "size": {"min_pixels": 3136, "max_pixels": 12_845_056}}},
        "both": {"processor_config.json": whole, "preprocessor_config.json": {**plain, "min_pixels": 3136, "max_pixels": 12_845_056}},
    }


def grids(processor: object) -> list[list[int]]:
    return processor(images=[Image.new("RGB", size) for size in SIZES], return_tensors="pt")["image_grid_thw"].tolist()


@pytest.mark.known_failure("final-model-pixels")
@pytest.mark.parametrize("form", ["5.19", "4.57", "4.49", "4.45", "both"])
def test_transformers_resizes_as_in_training(form: str, random_model: Path, tmp_path: Path) -> None:
    """transformers' processor of the written folder computes the grids of the training limits, for
    every form of the processor files. The source folder stays unchanged."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for path in random_model.iterdir():
        if path.name not in ("processor_config.json", "model.safetensors"):
            shutil.copy(path, source)
    for name, content in forms(random_model)[form].items():
        (source / name).write_text(json.dumps(content))
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    copy_companions(source, out, pixels=LIMITS)
    expected = [[1, *(side // 14 for side in smart_resize(height, width, factor=28, min_pixels=LIMITS[0], max_pixels=LIMITS[1]))]
                for width, height in SIZES]  # fmt: skip
    if form != "4.45":  # transformers 5.19 loads this form and does not resize with it
        assert grids(AutoProcessor.from_pretrained(source).image_processor) != expected
    assert grids(AutoProcessor.from_pretrained(out).image_processor) == expected
    assert read_pixel_limits(out) == LIMITS
    older = json.loads((out / "preprocessor_config.json").read_text())
    assert (older["min_pixels"], older["max_pixels"], older["size"]) == (*LIMITS, {"longest_edge": 48_000, "shortest_edge": 40_000})
    (out / "processor_config.json").unlink(missing_ok=True)  # readers before transformers 5 ignore this file
    assert grids(AutoImageProcessor.from_pretrained(out)) == expected
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_folder_without_a_processor_stays_without_one(tmp_path: Path) -> None:
    """No processor file is created in a folder without one, and no limits are read from it or from
    a damaged file."""
    write_pixel_limits(tmp_path, LIMITS)
    assert list(tmp_path.iterdir()) == []
    assert read_pixel_limits(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("[")
    assert read_pixel_limits(tmp_path) is None


@pytest.mark.parametrize("older", [{}, {"min_pixels": 40_000}, {"max_pixels": 48_000}, {"min_pixels": 40_000, "max_pixels": 48_000}])
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_of_two_limits_that_differ_transformers_is_followed(file: str, older: dict[str, int], random_model: Path, tmp_path: Path) -> None:
    """If `size` and the older fields differ, `read_pixel_limits` returns the limits by which
    transformers resizes. `size` has 30,000 to 90,000, and the older fields have other values."""
    part = json.loads((random_model / "processor_config.json").read_text())["image_processor"]
    part = {**part, "size": {"shortest_edge": 30_000, "longest_edge": 90_000}, **older}
    (tmp_path / file).write_text(json.dumps({"image_processor": part} if file == "processor_config.json" else part))
    least, most = read_pixel_limits(tmp_path)
    expected = [[1, *(side // 14 for side in smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most))]
                for width, height in SIZES]  # fmt: skip
    assert grids(AutoImageProcessor.from_pretrained(tmp_path)) == expected
