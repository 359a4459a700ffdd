"""Checkpoints that several test modules convert from."""

from pathlib import Path

import pytest

from tools.convert import converter_hf_to_mcore


@pytest.fixture(scope="session")
def checkpoints(random_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """'untied', 'tied': (Hugging Face folder, the checkpoint that the converter made of it)."""
    folder = tmp_path_factory.mktemp("mcore")
    for name, model in (("untied", random_model), ("tied", tied_model)):
        assert converter_hf_to_mcore.main(["--hf", str(model), "--out", str(folder / name), "--tp", "2"]) == 0
    return {"untied": (random_model, folder / "untied"), "tied": (tied_model, folder / "tied")}
