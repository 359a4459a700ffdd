"""Which data types a run uses where the settings leave the choice open."""

import pytest
import torch

from megatron_rl.config import EngineSettings, ModelSettings, Settings
from megatron_rl.dtypes import dtype_name, resolve_dtypes, torch_dtype


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_device_decides(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is bfloat16 on GPUs and float32 on CPUs; a given data type stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    expected = "bfloat16" if on_gpu else "float32"
    assert dtype_name("auto") == expected and torch_dtype("auto") == getattr(torch, expected)
    found = resolve_dtypes(Settings(engine=EngineSettings(dtype="float32")))
    assert (found.model.dtype, found.engine.dtype) == (expected, "float32")
    found = resolve_dtypes(Settings(model=ModelSettings(dtype="bfloat16")), on_gpu=not on_gpu)
    assert (found.model.dtype, found.engine.dtype) == ("bfloat16", "float32" if on_gpu else "bfloat16")
