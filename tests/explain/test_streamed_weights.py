"""Hugging Face's model run one module at a time gives the same bits as the whole model, with memory
for its largest module only.

A report made this way by two ranks equals the report of one process.
"""

import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.cli.explain import main
from megatron_rl.config import ModelSettings
from megatron_rl.explain.hf_reference import HfReferenceModel
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import make_patch_fn
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.engine_logprob_oracle import policy_logits
from tests.support.explain_run_folder import STALE_TENSOR, make_rollouts, nested_name, write_run

MODELS = {"qwen2_5_vl": {}, "tied": {"tied": True}, "qwen2_vl": {"family": "qwen2_vl"}, "qwen3_vl": {"family": "qwen3_vl"},
          "qwen3_vl_moe": {"family": "qwen3_vl_moe"}, "qwen3_5_moe": {"family": "qwen3_5_moe"}}  # fmt: skip


class Counted:
    """A tensor source that counts the bytes of its returned tensors that are still alive."""

    def __init__(self, folder: Path) -> None:
        self.source = open_source(folder, read_spec(str(folder)), key="model")
        self.specs, self.alive, self.most = self.source.specs, 0, 0

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name).clone()
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._gone, tensor.nbytes)
        return tensor

    def _gone(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_whole_model(name: str, tmp_path: Path) -> None:
    """Logits equal those of the whole model bit for bit, with none, half and all of the weights
    cached. Memory never exceeds the cache plus the largest module."""
    make_checkpoint(tmp_path / "model", init="random", seed=1, **MODELS[name])
    renderer = Renderer(ModelSettings(path=str(tmp_path / "model")))
    context = make_rollouts(renderer)[0].sequences[0]
    looked = RecordedSequence(0, 0, context)
    hf = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    expected = policy_logits(hf, context.token_ids, context.images, renderer=renderer)[looked.sampled_rows]
    modules = [sum(each.nbytes for each in module.parameters(recurse=False)) for module in hf.modules()]
    total = sum(parameter.nbytes for parameter in hf.parameters())
    for held in (0, total // 2, total):
        source = Counted(tmp_path / "model")
        reference = HfReferenceModel(
            read_spec(str(tmp_path / "model")), source, banned_ids=renderer.banned_ids, patches=make_patch_fn(renderer),
            device=torch.device("cpu"), cache_bytes=held,
        )  # fmt: skip
        assert set(reference.weights.names) == {canonical_name(each) for each, _ in hf.named_parameters()} == set(source.specs)
        for _ in range(2):
            logits_RV = reference.compute_logits(looked).double().masked_fill(reference.banned_mask, -torch.inf)
            torch.testing.assert_close(logits_RV, expected, rtol=0, atol=0)
            assert all(each.is_meta for each in reference.model.parameters())
        assert source.alive <= held and source.most <= held + max(modules)
        assert held < total or source.alive == total


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "older"
    make_checkpoint(out, preset="nano", init="random", seed=5)
    return out


def test_two_ranks_say_what_one_process_says(random_model: Path, older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks that hold no whole model print the same findings as one process, and name the stale
    tensor in the recorded logprobs. Their engine spans both ranks, as the run's did."""
    tensor = dict(AutoModelForImageTextToText.from_pretrained(older, dtype=torch.float32).named_parameters())[
        nested_name(STALE_TENSOR)
    ].detach()

    def stale(model: torch.nn.Module) -> None:
        with torch.no_grad():
            dict(model.named_parameters())[nested_name(STALE_TENSOR)].copy_(tensor)

    run = write_run(tmp_path / "run", random_model, change_model=stale)
    config = run / "config.yaml"
    before, _, engine = config.read_text().partition("engine:\n")
    assert "\n  tp: 1\n" in engine
    config.write_text(before + "engine:\n" + engine.replace("\n  tp: 1\n", "\n  tp: 2\n", 1))
    given = (run, "--step", "0", "--older", older)
    assert main([str(each) for each in given]) == 1
    one = capsys.readouterr().out.splitlines()
    result = fork_server.run_world(2, ROOT / "launch" / "explain.py", *given, "--tp", "2", "--whole-gb", "0", "--engine", timeout_s=240)
    assert result.returncode == 1, result.stdout
    two = result.stdout.splitlines()
    alone = ("trainer, one process", "trainer, packed", "weights in the trainer")
    assert [line for line in one if not line.strip().startswith(alone)] == [line for line in two if not line.strip().startswith(OWN)]
    assert any(f"{STALE_TENSOR} is stale" in line for line in two), result.stdout
    for name in OWN[:3]:
        assert [" ok " in line for line in two if line.strip().startswith(name)] == [True], result.stdout


OWN = ("weights at tp 2 x pp 1", "trainer, tp 2 x pp 1", "engine, live", "skipped:", "trainer, one process: its weights")
"""What is said at two ranks alone."""
