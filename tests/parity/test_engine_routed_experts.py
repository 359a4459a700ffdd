"""Experts that a vLLM engine returns, against those that Hugging Face's routers choose."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForImageTextToText, PreTrainedModel

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import EngineSettings, ModelSettings, OptimSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.policy.parallel import destroy_layout
from megatron_rl.policy.routed_experts import RoutingFormat, gather_routed_experts
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.rollout.vllm.server_command import expected_fingerprint
from megatron_rl.types import Rollout, TokenSequence
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, generate_all
from tests.support.hf_reference import to_released_form
from tests.support.packed_example import make_picture, make_prompts, user_message
from tests.support.routing_run import choose_by_mixed_logits
from tests.support.single_process_policy import make_policy_and_renderer
from tests.support.vllm_servers import ENGINE_SETTINGS, TOKEN, connect_server_engine, serve_engines

pytestmark = pytest.mark.timeout(600)
TIE = 1e-5
"""Experts are compared where the logits of the last chosen and the first other expert differ more.
"""


@pytest.fixture(scope="module", params=["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "moe"
    make_checkpoint(folder, family=request.param, init="random", seed=1, vision_depth=2)
    return folder


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(model)))


@pytest.fixture(scope="module")
def hf(model: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    """An engine with a cache of 512 tokens, in a world that a policy can use as well."""
    connect(read_world(), timeout_s=60)
    settings = EngineSettings(kv_cache_mib=1, max_model_len=384, dtype="float32", return_routed_experts=True)
    engine = ColocatedEngine(str(model), settings, special_tokens=renderer.special_tokens, group=None)
    yield engine
    engine.close()  # also destroys the world


@torch.no_grad()
def router_logits(hf: PreTrainedModel, context: TokenSequence, *, image_token_id: int) -> torch.Tensor:
    """Return the logits [L, sparse layers, experts] of HF's routers."""
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in hf.model.language_model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda gate, inputs, _: found.append(linear(inputs[0], gate.weight))) for gate in gates]
    ids, images = torch.tensor([context.token_ids]), {}
    if context.images:
        grid = torch.tensor([image.grid for image in context.images])
        images = {"pixel_values": torch.cat([image.patch_PC for image in context.images]), "image_grid_thw": grid}
    hf(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == image_token_id).int(), **images)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def check_experts(hf: PreTrainedModel, renderer: Renderer, contexts: list[TokenSequence], *, first: int = 0) -> None:
    """Compare the experts of all tokens from `first` with HF's choices."""
    routing = RoutingFormat.from_spec(read_spec(renderer.tokenizer.name_or_path))
    for context in contexts:
        assert len(context.routed_experts) == len(context.token_ids) - 1
        experts = torch.from_numpy(routing.decode(context.routed_experts, "")[first:]).long()
        logits = router_logits(hf, context, image_token_id=renderer.image_token_id)[first:-1]
        highest = logits.topk(routing.top_k + 1).values
        is_clear = highest[..., -2] - highest[..., -1] > TIE
        assert is_clear.float().mean() > 0.99
        assert (experts.sort(-1).values == logits.topk(routing.top_k).indices.sort(-1).values)[is_clear].all()


def generate_turn(engine: ColocatedEngine | ServerEngine, contexts: list[TokenSequence], *, max_tokens: int, seed: int) -> None:
    samplings = [
        SamplingSettings(max_tokens=max_tokens, temperature=1.0, seed=seed + number, routed_experts_start=len(context.routed_experts))
        for number, context in enumerate(contexts)
    ]
    for context, completion in zip(contexts, generate_all(engine, contexts, samplings), strict=True):
        context.extend(completion.token_ids, logprobs=completion.logprobs)
        context.routed_experts.extend(completion.routed_experts)


def check_two_turns(engine: ColocatedEngine | ServerEngine, hf: PreTrainedModel, renderer: Renderer) -> None:
    """Generate two turns of each prompt, with an image between them, and check the experts."""
    contexts = make_prompts(renderer)
    for turn in range(2):
        generate_turn(engine, contexts, max_tokens=12, seed=10 * turn)
        check_experts(hf, renderer, contexts)
        for number, context in enumerate(contexts):
            more = renderer.observation(context, [user_message("And this?", make_picture(7 + number, 84, 56))])
            context.extend(more.token_ids, images=tuple(more.images))


@pytest.mark.known_failure("routing-replay-without-images")
def test_experts_of_all_tokens_are_returned(
    engine: ColocatedEngine, hf: PreTrainedModel, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts equal HF's for prompts with images, two turns, cached prefixes and preempted
    requests.
    """
    from megatron_rl.rollout.vllm.routed_experts import RecordingScheduler

    preempted: list[str] = []
    preempt = RecordingScheduler._preempt_request

    def counted(self: RecordingScheduler, request: Any, *given: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *given, **options)

    monkeypatch.setattr(RecordingScheduler, "_preempt_request", counted)
    cached = engine._core._engine.engine_core.engine_core.scheduler.kv_cache_manager
    hits: list[int] = []
    lookup = cached.get_computed_blocks
    monkeypatch.setattr(cached, "get_computed_blocks", lambda request: (found := lookup(request), hits.append(found[1]))[0])
    check_two_turns(engine, hf, renderer)
    assert max(hits) >= 32, "a block of a prompt is cached"
    preempted.clear()
    fresh = make_prompts(renderer)
    generate_turn(engine, fresh, max_tokens=150 if hf.config.model_type == "qwen3_vl_moe" else 300, seed=50)
    assert len(preempted) >= 1, "the cache is too small for all requests"
    check_experts(hf, renderer, fresh)
    again = make_prompts(renderer)[-1:]
    hits.clear()
    generate_turn(engine, again, max_tokens=4, seed=99)
    # The state of a delta net after that block has been evicted by the long sequences.
    assert hits[0] >= (32 if hf.config.model_type == "qwen3_vl_moe" else 0), "a block of the prompt is cached"
    assert again[0].routed_experts[: len(fresh[-1].routed_experts)][:32] == fresh[-1].routed_experts[:32]
    check_experts(hf, renderer, again)


def test_new_weights_choose_anew(engine: ColocatedEngine, hf: PreTrainedModel, renderer: Renderer) -> None:
    """After a weight update with negated routers, all experts are others and equal HF's."""
    before = make_prompts(renderer)[:2]
    generate_turn(engine, before, max_tokens=4, seed=0)
    sent = {canonical_name(name): to_released_form(name, tensor.clone(), hf.config.model_type) for name, tensor in hf.state_dict().items()}
    gates = {name for name in sent if name.endswith("mlp.gate.weight")}
    engine.load_weights(((name, -tensor if name in gates else tensor) for name, tensor in sent.items()), version=1)
    after = make_prompts(renderer)[:2]
    generate_turn(engine, after, max_tokens=4, seed=0)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.neg_()
    check_experts(hf, renderer, after)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.neg_()
    same = [
        a == b for one, other in zip(before, after, strict=True) for a, b in zip(one.routed_experts, other.routed_experts, strict=False)
    ]
    assert sum(same) < 0.1 * len(same)
    engine.load_weights(iter(sent.items()), version=2)


def test_replay_removes_the_difference_of_perturbed_routers(
    engine: ColocatedEngine, model: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an engine chooses experts by other logits, its logprobs differ from the trainer's by more
    than 0.1; with replay they differ by at most 1e-4.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    engine._core._reset_caches()
    monkeypatch.setattr(CPURouter, "_compute_routing", choose_by_mixed_logits)
    contexts = make_prompts(renderer)
    generate_turn(engine, contexts, max_tokens=16, seed=0)
    for context in contexts:
        more = renderer.observation(context, [user_message("And this?", make_picture(7, 84, 56))])
        context.extend(more.token_ids, images=tuple(more.images))
    generate_turn(engine, contexts, max_tokens=16, seed=20)
    policy, _ = make_policy_and_renderer(model, OptimSettings())
    rollouts = [Rollout("t", str(number), 0, number, sequences=[context]) for number, context in enumerate(contexts)]
    batches = policy.pack([PackItem(context, origin=(number, 0)) for number, context in enumerate(contexts)], max_tokens=400)
    gaps = []
    for replays in (False, True):
        for batch in batches if replays else []:
            batch.routed_experts_TLK = gather_routed_experts(rollouts, batch, RoutingFormat.from_spec(policy.spec))
        found = zip(batches, policy.logprobs(batches), strict=True)
        gaps.append(max((logprob_T - batch.rollout_logprob_T)[batch.mask_T].abs().max().item() for batch, logprob_T in found))
    policy.close()
    destroy_layout()
    print(f"largest difference of logprobs without and with replay: {gaps[0]:.3g}, {gaps[1]:.3g}")
    assert gaps[0] >= 0.1 and gaps[1] <= LOGPROB_BOUND


@pytest.mark.long
def test_servers_return_the_experts(model: Path, renderer: Renderer, hf: PreTrainedModel, tmp_path: Path) -> None:
    """A server returns the same experts over HTTP, also with images and for a second turn. A run
    without routing replay refuses the server in one line.
    """
    settings = replace(ENGINE_SETTINGS, return_routed_experts=True)
    sent = {canonical_name(name): to_released_form(name, tensor, hf.config.model_type) for name, tensor in hf.state_dict().items()}
    with serve_engines(model, tmp_path, num_servers=1, settings=settings) as urls:
        with connect_server_engine(urls, renderer, settings=settings) as engine:
            engine.load_weights(iter(sent.items()), version=1)
            check_two_turns(engine, hf, renderer)
        others = expected_fingerprint(ENGINE_SETTINGS, str(model), banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)
        line = "has engine.return_routed_experts true, but this run has false; start it with"
        with pytest.raises(ValueError, match=line):
            VllmServer(urls[0], token=TOKEN).check(others)
