"""Fixtures: one real engine per test module, and the Hugging Face model that it is compared
with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.renderer import Renderer
from tests.support.engine_logprob_oracle import open_engine


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture(scope="module")
def hf(random_model: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(random_model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    with open_engine(random_model, renderer) as engine:
        yield engine
