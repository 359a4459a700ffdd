"""Short runs of Qwen2-VL (two ranks with half of the model and of a padded vocabulary each), of
Qwen3-VL and Qwen3.5, dense and with experts (two ranks in tests marked long), with real engines
and real weight updates.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from megatron_rl.observe.metrics import read_metrics
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.support.indivisible_vocabulary import add_tokens

CASES = [
    ("qwen2_vl", 2, "tp"), ("qwen3_vl", 1, "tp"), ("qwen3_vl_moe", 1, "tp"),
    *(pytest.param("qwen3_vl_moe", 2, kind, marks=pytest.mark.long) for kind in ("tp", "ep")),
    *(pytest.param("qwen3_5", ranks, "tp", marks=pytest.mark.long) for ranks in (1, 2)),
    *(pytest.param("qwen3_5_moe", *case, marks=pytest.mark.long) for case in ((1, "tp"), (2, "tp"), (2, "ep"))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "ranks", "kind"), CASES)
def test_a_run_of_two_steps(family: str, ranks: int, kind: str, torchrun: Callable[..., str], tmp_path: Path) -> None:
    """After the first update, which changes the policy by a large amount, the engine's logprobs
    still match the trainer's within 1e-4. The final folder loads in transformers without missing
    keys, and every tensor has changed by at least 1e-3.
    """
    make_checkpoint(tmp_path / "model", family=family, init="random", seed=1, vision_depth=3)
    model = add_tokens(tmp_path / "model", tmp_path / "odd") if ranks > 1 else tmp_path / "model"
    torchrun(ranks, SUPPORT / "family_run.py", model, tmp_path / "run", kind)
    first, second, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(
        step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4 and step["grad_norm"] > 0 and step["rollout/failed"] == 0
        for step in (first, second)
    )
    before, (after, report) = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for folder in (model, tmp_path / "run" / "final")
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    old = before[0].state_dict()
    still = [name for name, tensor in after.state_dict().items() if (tensor - old[name]).abs().max() < 1e-3]
    assert still == [], "every part is trained"


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5"])
def test_a_run_with_adapters(family: str, torchrun: Callable[..., str], tmp_path: Path) -> None:
    """The engine receives the merged weights: its logprobs match the trainer's after the first update.
    PEFT's merge of the exported adapter into the base model is the final model.
    """
    make_checkpoint(tmp_path / "model", family=family, init="random", seed=1, vision_depth=3)
    torchrun(1, SUPPORT / "family_run.py", tmp_path / "model", tmp_path / "run", "lora")
    first, second, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4 and step["grad_norm"] > 0 for step in (first, second))
    base, final = (AutoModelForImageTextToText.from_pretrained(tmp_path / each, dtype=torch.float32) for each in ("model", "run/final"))
    old = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").merge_and_unload().state_dict()
    assert merged.keys() == old.keys() == final.state_dict().keys()
    assert max((tensor - merged[name]).abs().max() for name, tensor in final.state_dict().items()) <= 1e-6
    parts = {"qwen3_vl_moe": ("experts.gate_up_proj", "experts.down_proj"), "qwen3_5": ("in_proj_qkv.weight", "q_proj.weight")}[family]
    changed = [name for name in old if name.endswith(parts)]
    assert len(changed) >= 4 and all((merged[name] - old[name]).abs().max() > 1e-3 for name in changed)
