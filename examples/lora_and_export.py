"""Train a LoRA adapter, and export it merged into its base model.

    python launch/launch.py --nproc_per_node 2 examples/lora_and_export.py

The run trains adapters of rank 8 and writes two results: RUN/adapter, in PEFT's format, and
RUN/final, the merged model. The script then lets PEFT merge the adapter into the base model, writes
the result to RUN/merged, and prints the largest difference from RUN/final.

Expect a difference below 1e-6. transformers and vLLM load RUN/final and RUN/merged without PEFT.
"""

import os
import sys
from pathlib import Path

import yaml
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_rl.cli import cli

MODEL = "runs/quickstart/sft/final"
DEFAULTS = [
    "experiment=numberline_grpo_cpu",
    f"model.path={MODEL}",
    "lora.rank=8",
    "lora.alpha=16",
    "optim.lr=2e-3",
    "run.dir=runs/examples/lora",
    "run.steps=15",
]


def export(base: str, run_dir: Path) -> float:
    """Merge RUN/adapter into the base model and return the largest difference from RUN/final."""
    merged = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base, dtype="float32"), run_dir / "adapter")
    merged = merged.merge_and_unload()
    merged.save_pretrained(run_dir / "merged")
    AutoProcessor.from_pretrained(run_dir / "final").save_pretrained(run_dir / "merged")
    final = AutoModelForImageTextToText.from_pretrained(run_dir / "final", dtype="float32").state_dict()
    return max((tensor - final[name]).abs().max().item() for name, tensor in merged.state_dict().items())


if __name__ == "__main__":
    if not any(word.startswith("model.path=") for word in sys.argv) and not Path(MODEL).exists():
        sys.exit(f"error: model.path={MODEL}: no such folder; bash launch/quickstart.sh creates it")
    sys.argv[1:1] = DEFAULTS
    cli()
    folder = Path(next(word for word in reversed(sys.argv) if word.startswith("run.dir=")).partition("=")[2])
    if (folder / "adapter").exists() and os.environ.get("RANK", "0") == "0":
        base = yaml.safe_load((folder / "config.yaml").read_text())["model"]["path"]
        print(f"{folder}/merged: differs from {folder}/final by at most {export(base, folder):.1e}")
