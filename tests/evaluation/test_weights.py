"""launch/evaluate.py evaluates Megatron checkpoints and PEFT adapters.

The oracle is the Hugging Face folder with the same weights; for adapters, the folder merged by
PEFT. All responses, rewards and metrics are equal, and logprobs are equal within 1e-5.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from megatron_rl.observe.recorder import read_recorded
from megatron_rl_tools.convert.converter_hf_to_mcore import main as convert
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.vllm_servers import ENGINE_SETTINGS, serve_engines

EVALUATE = ROOT / "launch" / "evaluate.py"
GAME = (
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "engine.max_model_len=512", "run.seed=5",
    "task=number_line", "task.max_turns=2", "task.max_new_tokens=6", "task.options.invalid=random",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return played(tmp_path_factory.mktemp("base") / "out", f"model.path={random_model}")


def played(out: Path, *words: str) -> str:
    """Run an evaluation and return its responses and rewards followed by its scores."""
    result = fork_server.run_script(EVALUATE, *GAME, *words, f"run.dir={out}", timeout_s=240)
    assert result.returncode == 0, result.stdout
    return (out / "examples.jsonl").read_text() + json.dumps(json.loads((out / "evaluation.json").read_text())["scores"])


def logprobs(out: Path) -> torch.Tensor:
    """Return the logprobs of all sampled tokens.

    Equal tokens alone would not prove equal weights; equal logprobs do.
    """
    entries = read_recorded(out / "rollouts" / "step_000000.jsonl", with_images=False)
    return torch.tensor([logprob for entry in entries for context in entry.rollout.sequences for logprob in context.rollout_logprobs])


def test_a_checkpoint_of_megatrons(base: str, random_model: Path, tmp_path: Path) -> None:
    """A Megatron checkpoint, written by the converter for tp 2 and pp 2, is evaluated like the
    Hugging Face folder it was converted from."""
    make_checkpoint(tmp_path / "hf", preset="nano", init="random", seed=7)
    assert convert(["--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "mcore"), "--tp", "2", "--pp", "2"]) == 0
    expected = played(tmp_path / "expected", f"model.path={tmp_path}/hf")
    found = played(tmp_path / "found", f"model.path={random_model}", f"evaluation.weights={tmp_path}/mcore")
    assert found == expected != base
    torch.testing.assert_close(logprobs(tmp_path / "found"), logprobs(tmp_path / "expected"), rtol=0, atol=1e-5)


def test_on_a_server_that_runs_elsewhere(base: str, random_model: Path, tmp_path: Path) -> None:
    """A remote server receives the weights to evaluate, which replace those that it was started
    with."""
    make_checkpoint(tmp_path / "other", preset="nano", init="random", seed=7)
    settings = replace(ENGINE_SETTINGS, kv_cache_mib=16, max_model_len=512)
    with serve_engines(random_model, tmp_path, num_servers=1, settings=settings, pixel_limits={"min_pixels": 3136, "max_pixels": 4000}) as (
        url,
    ):
        asked = (f"engine.urls=[{url}]", f"engine.token_file={tmp_path}/token")
        remote = ("engine.mode=server", *asked, "engine.health_timeout_s=60", f"model.path={random_model}")
        first = played(tmp_path / "first", *remote)
        second = played(tmp_path / "second", *remote, f"evaluation.weights={tmp_path}/other")
    assert first == base and second == played(tmp_path / "expected", f"model.path={random_model}", f"evaluation.weights={tmp_path}/other")
    torch.testing.assert_close(logprobs(tmp_path / "second"), logprobs(tmp_path / "expected"), rtol=0, atol=1e-5)


def test_an_adapter_of_pefts(base: str, random_model: Path, tmp_path: Path) -> None:
    """A PEFT adapter is evaluated like the model that PEFT merged it into."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(random_model, dtype=torch.float32)
    targets = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(" + "|".join(targets) + ")"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = played(tmp_path / "expected", f"model.path={random_model}", f"evaluation.weights={tmp_path}/merged")
    found = played(tmp_path / "found", f"model.path={random_model}", f"evaluation.weights={tmp_path}/adapter")
    assert found == expected != base
    torch.testing.assert_close(logprobs(tmp_path / "found"), logprobs(tmp_path / "expected"), rtol=0, atol=1e-5)
