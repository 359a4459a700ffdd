"""Data types of the trainer and the engine, and their default on this machine."""

from dataclasses import replace

import torch

from megatron_rl.config import Settings

AUTO = "auto"


def dtype_name(name: str, *, on_gpu: bool | None = None) -> str:
    """Return the data type that a setting selects.

    "auto" selects bfloat16 on GPUs and float32 on CPUs. `on_gpu` is None for this machine.
    """
    if name != AUTO:
        return name
    return "bfloat16" if (torch.cuda.is_available() if on_gpu is None else on_gpu) else "float32"


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type for the value of a setting; "auto" as in `dtype_name`."""
    return getattr(torch, dtype_name(name))


def resolve_dtypes(settings: Settings, *, on_gpu: bool | None = None) -> Settings:
    """Return the settings with the data types that the run uses instead of "auto"."""
    model = replace(settings.model, dtype=dtype_name(settings.model.dtype, on_gpu=on_gpu))
    return replace(settings, model=model, engine=replace(settings.engine, dtype=dtype_name(settings.engine.dtype, on_gpu=on_gpu)))
