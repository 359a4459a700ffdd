"""The rollout engine on an emulated device, with asynchronous scheduling as on a GPU: vLLM's own
worker, model runner and schedulers, and this project's hooks.

vLLM schedules a step before it has read the tokens of the previous one. A weight update, an abort
and a sleeping engine therefore meet a step in flight.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cuda import device, vllm_platform

vllm_platform.install()

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402 (after vLLM has its platform)
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from megatron_rl.config import ModelSettings  # noqa: E402
from megatron_rl.policy.policy import Policy  # noqa: E402
from megatron_rl.rollout.colocated import ColocatedEngine  # noqa: E402
from megatron_rl.rollout.conversation import TokenConversation  # noqa: E402
from megatron_rl.rollout.engine import Completion, SamplingSettings  # noqa: E402
from megatron_rl.rollout.renderer import Renderer  # noqa: E402
from megatron_rl.rollout.vllm import worker_extension  # noqa: E402
from tests.parity import test_engine_versions as versions  # noqa: E402
from tests.parity.test_engine_versions import EPISODES, LIMITS, VERSIONS, gaps, played  # noqa: E402
from tests.rollout.vllm.test_weight_sender import StandIn, sender_to  # noqa: E402
from tests.support.cuda import nccl  # noqa: E402
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, check_frequencies, generate_all, open_engine  # noqa: E402
from tests.support.json_server import stop_server  # noqa: E402
from tests.support.packed_example import make_prompts  # noqa: E402

policies = versions.policies  # the fixture
VLLM_WAITS = {"synchronize event", "index on the host", "index by a mask"}
"""Waits of vLLM's model runner in a step: for its own copies, and for the images of a prompt."""


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture(scope="module")
def engine(policies: list[Policy], random_model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    nccl.install()
    with open_engine(random_model, renderer, reads_weights=False) as engine:
        engine.load_weights(policies[0].hf_weights(), version=0)
        yield engine


@pytest.fixture
def core(engine: ColocatedEngine) -> EngineCore:
    """Return vLLM's engine core."""
    return engine._core._engine.engine_core.engine_core


@pytest.fixture
def runner(core: EngineCore) -> GPUModelRunner:
    return core.model_executor.driver_worker.worker.model_runner


def test_the_engine_is_that_of_a_gpu(engine: ColocatedEngine, core: EngineCore, runner: GPUModelRunner) -> None:
    assert core.async_scheduling and core.batch_queue_size == 2 and core.step_fn == core.step_with_batch_queue
    assert runner.use_async_scheduling and runner.device == torch.device("cuda", 0)
    assert {str(parameter.device) for parameter in runner.model.parameters()} == {"cuda:0"}
    assert vllm_platform.pool_bytes("weights") >= sum(p.nbytes for p in runner.model.parameters())


def test_tokens_are_those_of_their_versions_with_a_step_in_flight(
    engine: ColocatedEngine,
    renderer: Renderer,
    policies: list[Policy],
    core: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each logprob is that of the trainer with the weights of the token's version. Both updates
    meet a step in flight on a sleeping engine. The trainer's tensors are on the device too."""
    in_flight, sleep = [], engine.sleep
    monkeypatch.setattr(engine, "sleep", lambda: (in_flight.append(len(core.batch_queue)), sleep()))
    versions.test_every_token_is_of_its_version(engine, renderer, policies)
    assert in_flight[: VERSIONS - 1] == [1] * (VERSIONS - 1)


def deliver_old_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were sampled before an update count as sampled after it."""
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda self, request, timestamp, drop_stale_output=False: preempt(self, request, timestamp)
    )


def keep_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self, *_: True)


def keep_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "reset_encoder_cache", lambda self: None)
    monkeypatch.setattr(GPUModelRunner, "reset_encoder_cache", lambda self: None)


@pytest.mark.parametrize("mistake", [lambda _: None, deliver_old_tokens, keep_prefixes, keep_pictures])
def test_an_update_of_an_engine_that_does_not_sleep(
    mistake: Callable,
    engine: ColocatedEngine,
    renderer: Renderer,
    policies: list[Policy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are those of their versions; an attribution to the wrong version, and what old weights
    computed, are noticed."""
    mistake(monkeypatch)
    found = gaps(played(engine, renderer, policies, sleeps=False), policies)
    gap = max(value for (version, trainer), value in found.items() if version == trainer)
    assert gap <= LOGPROB_BOUND if mistake.__name__ == "<lambda>" else gap > 10 * LOGPROB_BOUND
    monkeypatch.undo()
    engine._core._reset_caches()


@pytest.fixture
def seeded_noise(runner: GPUModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a token depends only on its seed and position, as on a CPU."""
    (own,) = (each for each in runner.input_batch.logitsprocs.all if type(each).__name__ == "BanAndSeed")

    def forward(logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        seeds_R = own.noise_seeds(len(logits)).to(logits.device)
        return torch.ops._C.fused_gumbel_argmax(logits, seeds_R), logits.log_softmax(dim=-1)

    monkeypatch.setattr(runner.sampler.topk_topp_sampler, "forward", forward)


def test_samples_equal_those_of_a_synchronous_schedule(
    engine: ColocatedEngine,
    renderer: Renderer,
    policies: list[Policy],
    core: EngineCore,
    seeded_noise: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, logprobs and stop reasons of a schedule with a step in flight, with two updates (the
    weights stay the same) and an abort on the way, equal those of a schedule in which every step
    ends before the next one begins, without updates."""
    cut = played(engine, renderer, [policies[0]] * VERSIONS)
    engine.load_weights(policies[0].hf_weights(), version=VERSIONS)
    engine.wake()
    samples = [generate_with_abort(engine, renderer)]
    while core.batch_queue:
        core.step_fn()
    whole = [TokenConversation(engine, renderer, LIMITS) for _ in range(EPISODES)]

    async def main() -> None:
        await asyncio.gather(*(versions.episode(each, index) for index, each in enumerate(whole)))

    monkeypatch.setattr(core, "step_fn", core.step)
    engine.run(main())
    samples.append(generate_with_abort(engine, renderer))
    for rollout, each in zip(cut, whole, strict=True):
        assert rollout.sequences[0].token_ids == each.sequences[0].token_ids
        assert rollout.sequences[0].rollout_logprobs == pytest.approx(each.sequences[0].rollout_logprobs, abs=LOGPROB_BOUND)
    for ours, theirs in zip(*samples, strict=True):
        assert (ours.token_ids, ours.is_stopped, ours.weight_versions) == (theirs.token_ids, theirs.is_stopped, theirs.weight_versions)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=LOGPROB_BOUND)


def generate_with_abort(engine: ColocatedEngine, renderer: Renderer) -> list[Completion]:
    """Sample with six prompts; abort every second request after seven steps."""
    prompts = make_prompts(renderer)

    async def main() -> list[Completion]:
        samplings = [SamplingSettings(max_tokens=20 + index, temperature=1.0, seed=90 + index) for index in range(len(prompts))]
        tasks = [asyncio.create_task(engine.generate(p.token_ids, p.images, each)) for p, each in zip(prompts, samplings, strict=True)]
        for _ in range(30):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks[::2])
        return [task.result() for task in tasks[1::2]]

    return engine.run(main())


def test_no_hook_waits_for_the_device(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Sampling with banned ids and the shared noise adds no wait to those of vLLM."""
    prompts, steps = make_prompts(renderer), Counter()
    step = engine._core.step
    engine._core.step = lambda: (steps.update(["steps"]), step())[1]
    device.waits.clear()
    made = generate_all(engine, prompts, [SamplingSettings(max_tokens=12, temperature=1.0, seed=index) for index in range(len(prompts))])
    del engine._core.step
    banned = set(renderer.banned_ids)
    assert all(len(each.token_ids) == 12 or each.is_stopped for each in made) and not banned & {t for each in made for t in each.token_ids}
    found = Counter(name.split(" < ")[0] for name in device.waits.elements())
    assert found.keys() <= VLLM_WAITS and found["synchronize event"] <= 3 * steps["steps"], device.waits
    assert not [name for name in device.waits if "sampler.py" in name]


def test_noise_is_drawn_on_the_device(engine: ColocatedEngine) -> None:
    """Tokens have the frequencies of their probabilities, and those of one seed are the same."""
    logits_V = torch.linspace(-3, 2, 40).index_fill(0, torch.tensor([7, 30]), -torch.inf)
    logits_RV = logits_V.to("cuda").expand(20_000, 40).contiguous()
    noise, drawn = engine._core._noise, []
    for seed in (5, 6, 5):
        noise.seed(seed)
        token_R, logprob_RV = noise._forward(logits_RV, {}, None, None)
        drawn.append(token_R)
    assert token_R.is_cuda and torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert (logprob_RV[0].cpu() - logits_V.log_softmax(0)).nan_to_num().abs().max() < 1e-6
    check_frequencies(20_000 * logits_V.double().softmax(0), Counter(token_R.tolist()))


@pytest.mark.known_failure("sleep-loses-weights")
def test_sleep_frees_weights_and_cache_and_leaves_nothing_of_the_images(
    engine: ColocatedEngine,
    renderer: Renderer,
    policies: list[Policy],
    runner: GPUModelRunner,
) -> None:
    """An idle engine keeps no patches, although its last step was still in flight when the last
    request ended. What was in the freed memory is gone, and a request needs weights first."""
    prompts = make_prompts(renderer)
    samplings = [SamplingSettings(max_tokens=6, temperature=1.0, seed=index) for index in range(len(prompts))]
    generate_all(engine, prompts, samplings)
    before = {tag: vllm_platform.pool_bytes(tag) for tag in vllm_platform.POOLS}
    weight = next(runner.model.parameters())
    engine.sleep()
    assert before["weights"] and before["kv_cache"] and not any(map(vllm_platform.pool_bytes, vllm_platform.POOLS))
    assert weight.flatten()[0].item() > 1e38, "memory that sleeps is not there"
    assert not runner.requests and not runner.encoder_cache and not engine._core.known_images() and not runner.input_batch.num_reqs
    with pytest.raises(AssertionError, match="load_weights must be called before wake"):
        engine.wake()
    engine.load_weights(policies[1].hf_weights(), version=1)
    assert vllm_platform.pool_bytes("weights") == before["weights"] and not vllm_platform.pool_bytes("kv_cache")
    engine.wake()
    assert {tag: vllm_platform.pool_bytes(tag) for tag in vllm_platform.POOLS} == before
    assert {version for each in generate_all(engine, prompts, samplings) for version in each.weight_versions} == {1}


class EngineServer(StandIn):
    """Server that passes weight transfers to vLLM's worker, through this project's endpoint."""

    def __init__(self, engine: ColocatedEngine, runner: GPUModelRunner) -> None:
        super().__init__()
        config = engine._core._engine.vllm_config
        self.endpoint = worker_extension.VllmWeightEndpoint(None, config, runner.device, runner.model)

    def meet(self, body: dict) -> None:
        self.endpoint.init_transfer_engine(worker_extension.InitInfo(**body["init_info"]))

    def start(self, body: dict) -> None:
        self.endpoint.start_weight_update()

    def take(self, body: dict) -> None:
        self.endpoint.receive_weights(worker_extension.UpdateInfo(**body["update_info"]))

    def finish(self, body: dict) -> None:
        self.endpoint.finish_weight_update()
        self.label = body["weight_version"]


@pytest.fixture
def server(engine: ColocatedEngine, runner: GPUModelRunner) -> Iterator[EngineServer]:
    made = EngineServer(engine, runner)
    yield made
    stop_server(made.http)


def test_a_server_receives_weights_over_nccl(server: EngineServer, policies: list[Policy], runner: GPUModelRunner) -> None:
    """The trainer is on GPU 1, the server on GPU 0. A server that comes back receives the last
    update from host memory."""
    tensors = [(name, tensor.to("cuda:1")) for name, tensor in policies[2].hf_weights()]
    torch.cuda.set_device(1)
    try:
        sender = sender_to(server, kind="nccl", device=torch.device("cuda", 1), bucket_bytes=1 << 20)
        sender.lock_servers()
        assert sender.send(tensors, "mine.1", urls=[server.url]) == ([server.url], {}) and server.label == "mine.1"
        held = {name: parameter.clone() for name, parameter in runner.model.named_parameters()}
        for parameter in runner.model.parameters():
            parameter.data.zero_()
        sender.add_server(server.url)
        assert all(torch.equal(parameter, held[name]) for name, parameter in runner.model.named_parameters())
    finally:
        torch.cuda.set_device(0)
