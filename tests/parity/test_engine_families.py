"""Engines of Qwen2-VL, and of Qwen3-VL and Qwen3.5, dense and with experts, receive weights as the
policy sends them.

Their logprobs are compared with Hugging Face's.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.config import ModelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.weight_receiver import to_hf_name
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, generate_all, max_logprob_diff, open_engine
from tests.support.hf_reference import to_released_form
from tests.support.merge_checks import run_merge
from tests.support.packed_example import make_picture, make_prompts, user_message

EXPERTS = "model.language_model.layers.2.mlp."
DELTA_NET = "model.language_model.layers.1.linear_attn."
SPOILED = {
    "qwen3_vl_moe": [f"{EXPERTS}experts.gate_up_proj", f"{EXPERTS}experts.down_proj", f"{EXPERTS}gate.weight"],
    "qwen3_5": [f"{DELTA_NET}{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias")],
    "qwen3_5_moe": [f"{EXPERTS}{name}" for name in (
        "experts.gate_up_proj", "experts.down_proj", "gate.weight", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"
    )],
}  # fmt: skip
"""Starts of the names of tensors in which a bit is flipped, if not the merger's."""
SQUARE = torch.tensor([[1, 4, 4]])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_the_engine_serves_what_it_was_sent(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs equal HF's for text, images of two sizes, and a second turn with another image.

    If a bit flips during the transfer, the error names the tensor.
    """
    make_checkpoint(tmp_path / "model", family=family, init="random", seed=1, vision_depth=4)
    renderer = Renderer(ModelSettings(path=str(tmp_path / "model")))
    hf = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    sent = {canonical_name(name): to_released_form(name, tensor, family) for name, tensor in hf.state_dict().items()}
    assert sent.keys() == {name for row in read_spec(tmp_path / "model").param_mappings() for name in row.hf_names}
    with open_engine(tmp_path / "model", renderer, reads_weights=False) as engine:
        engine.load_weights(iter(sent.items()), version=1)
        contexts = make_prompts(renderer)
        for turn in range(2):
            samplings = [SamplingSettings(max_tokens=8, temperature=0.7, seed=10 * turn + number) for number in range(len(contexts))]
            for number, (context, completion) in enumerate(zip(contexts, generate_all(engine, contexts, samplings), strict=True)):
                assert max_logprob_diff(hf, context, completion, temperature=0.7, renderer=renderer) <= LOGPROB_BOUND
                context.extend(completion.token_ids, logprobs=completion.logprobs)
                more = renderer.observation(context, [user_message("And this?", make_picture(7 + number, 84, 56))])
                context.extend(more.token_ids, images=tuple(more.images))
        runner, spec = engine._core._engine.model_executor.driver_worker.worker.model_runner, read_spec(tmp_path / "model")
        added = (
            runner.get_model().deepstack_input_embeds if spec.vision.num_deepstack_layers else []
        )  # as counted in memory_plan/engine_memory.py
        assert [rows.shape for rows in added] == [(runner.max_num_tokens, spec.hidden_size)] * spec.vision.num_deepstack_layers
        (seen,) = runner.get_model().embed_multimodal(pixel_values=torch.zeros(16, spec.vision.patch_dim), image_grid_thw=SQUARE)
        assert seen.shape == (4, (1 + spec.vision.num_deepstack_layers) * spec.vision.out_hidden_size)
        weights = engine._core.weights
        deliver = weights.load_bucket

        def flips_a_bit(bucket: list[tuple[str, torch.Tensor]], *, spoiled: str) -> None:
            deliver(bucket)
            name = next(name for name in weights._locations if to_hf_name(name).startswith(spoiled))
            memory = weights._locations[name].slices[-1].memory
            memory[(-1,) * memory.dim()].view(torch.int32).bitwise_xor_(1)

        for version, spoiled in enumerate(SPOILED.get(family, ["model.visual.merger"]), start=2):
            monkeypatch.setattr(weights, "load_bucket", partial(flips_a_bit, spoiled=spoiled))
            with pytest.raises(RuntimeError, match=rf"differ from the sent weights: {spoiled}[^,]*$"):
                engine.load_weights(iter(sent.items()), version=version)


@pytest.mark.long
def test_the_engine_reads_separate_experts(tmp_path: Path) -> None:
    """vLLM loads the folder that the merger writes with --experts separate; its logprobs equal
    those of HF for the fused folder.
    """
    make_checkpoint(tmp_path / "model", family="qwen3_vl_moe", init="random", seed=1, vision_depth=4)
    assert run_merge(tmp_path / "model", tmp_path / "separate", "--experts", "separate") == 0
    renderer = Renderer(ModelSettings(path=str(tmp_path / "model")))
    hf = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with open_engine(tmp_path / "separate", renderer) as engine:
        contexts = make_prompts(renderer)
        samplings = [SamplingSettings(max_tokens=8, temperature=0.7, seed=number) for number in range(len(contexts))]
        for context, completion in zip(contexts, generate_all(engine, contexts, samplings), strict=True):
            assert max_logprob_diff(hf, context, completion, temperature=0.7, renderer=renderer) <= LOGPROB_BOUND
