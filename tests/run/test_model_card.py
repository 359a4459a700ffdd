"""Tests the model card: the metadata as read by the Hugging Face hub, and that the card names no
machines.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from megatron_rl.config import AlgoSettings, DataSettings, JudgeSettings, ModelSettings, OptimSettings, Settings, TaskSettings
from megatron_rl.run.model_card import make_model_card

BASE_CARD = "---\nlicense: other\nlicense_name: qwen-research\nbase_model: Somebody/Else\nlanguage:\n- en\n---\n# Base\n"


def settings(path: Path) -> Settings:
    data = DataSettings(train=["a.jsonl", "b.jsonl"], eval=["c.jsonl"])
    task = TaskSettings(name="vqa", data=data, judge=JudgeSettings(model="grader", urls=["http://inside:8000/v1"]))
    return Settings(model=ModelSettings(path=str(path), max_pixels=48_000), task=task, optim=OptimSettings(lr=3e-6), algo=AlgoSettings())


def test_the_card_names_base_license_settings_data_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(BASE_CARD)
    text = make_model_card(settings(tmp_path), metrics={"eval/success": 0.5, "eval/return": 1 / 3}, num_steps=7, folder=tmp_path / "final")
    card = ModelCard(text)
    assert (card.data.license, card.data.license_name, card.data.base_model) == ("other", "qwen-research", "Somebody/Else")
    assert card.data.tags[:2] == ["megatron-rl", "reinforcement-learning"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "image-text-to-text")
    for line in ("trained for 7 steps", "optim.lr: 3.0e-06", "model.max_pixels: 48000", "- training: a.jsonl, b.jsonl",
                 "- evaluation: c.jsonl", "- eval/success: 0.5", "- eval/return: 0.333333", "- transformers 5."):  # fmt: skip
        assert line in text, line
    assert "inside" not in text and str(tmp_path) not in text.replace(tmp_path.name, "")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"),
        ("models--Qwen--Qwen3-VL-4B-Instruct/snapshots/abc", "Qwen/Qwen3-VL-4B-Instruct"),
        ("own", "own"),
    ],
)
def test_the_base_is_named_as_on_the_hub(path: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    card = ModelCard(make_model_card(replace(settings(folder), stage="sft"), metrics={}, num_steps=1, folder=tmp_path))
    assert (card.data.base_model, card.data.license, card.data.tags[1]) == (name, None, "supervised-fine-tuning")


@pytest.mark.parametrize("broken", ["no front matter", "---\n: [\n---\n", "---\n- a\n---\n", "---\nlicense: mit"])
def test_a_base_whose_card_cannot_be_read_has_no_license(broken: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(broken)
    assert ModelCard(make_model_card(settings(tmp_path), metrics={}, num_steps=1, folder=tmp_path)).data.license is None
