"""RL trainer for vision-language agents, based on Megatron-Core and vLLM.

Example:
    from megatron_rl import train

    train("3b", data="mine.jsonl", eval_data="held_out.jsonl", run_dir="runs/mine", lora_rank=16)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.api import evaluate as evaluate
    from megatron_rl.api import train as train

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "train"]


def __getattr__(name: str) -> object:
    """Import `train` and `evaluate` on first use, because they import torch and Megatron."""
    if name in ("train", "evaluate"):
        from megatron_rl.compat.startup import quiet_imports

        with quiet_imports():
            from megatron_rl import api
        return {"train": api.train, "evaluate": api.evaluate}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
