"""The engine against Hugging Face: what it sampled, with what probability, under which weights; and what it refuses.

Oracle of every logprob: one HF float32 forward over the whole sequence, banned ids removed, divided by the temperature.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.engine import Completion, Engine, Sampling
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.transfer import checksum
from megatron_rl.types import HostFault, Image, Sequence
from tests.parity.packed import picture, prompts, user

BOUND = 1e-4
"""Absolute, in float32; what is seen is 5e-6."""
Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture(scope="module")
def hf(random_model: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(random_model: Path, renderer: Renderer) -> Iterator[Engine]:
    engine = Engine(
        str(random_model), EngineSettings(kv_cache_mib=32),
        image_token_id=renderer.image_token_id, banned_ids=renderer.banned_ids, stop_ids=renderer.stop_ids, group=None,
    )  # fmt: skip
    yield engine
    engine.close()


def generate(engine: Engine, sequences: list[Sequence], samplings: list[Sampling]) -> list[Completion]:
    async def main() -> list[Completion]:
        pairs = zip(sequences, samplings, strict=True)
        return await asyncio.gather(*(engine.generate(s.token_ids, s.images, sampling) for s, sampling in pairs))

    return engine.run(main())


@torch.no_grad()
def policy_logits(hf: Qwen2_5_VLForConditionalGeneration, token_ids: list[int], images: list[Image], *, renderer: Renderer) -> torch.Tensor:
    """float64 [L, vocabulary], banned ids at -inf."""
    ids = torch.tensor([token_ids])
    vision = {}
    if images:
        grid = torch.tensor([image.grid for image in images])
        vision = {"pixel_values": torch.cat([image.patch_PC for image in images]), "image_grid_thw": grid}
    kinds = (ids == renderer.image_token_id).int()
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **vision).logits[0].double()
    return logits.index_fill(1, torch.tensor(renderer.banned_ids), -torch.inf)


def gap(hf: Qwen2_5_VLForConditionalGeneration, sequence: Sequence, completion: Completion, *, temperature: float, renderer: Renderer) -> float:
    """Largest difference between the engine's logprobs and HF's."""
    token_ids = sequence.token_ids + completion.token_ids
    logits = policy_logits(hf, token_ids, sequence.images, renderer=renderer) / (temperature or 1.0)
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[len(sequence.token_ids) - 1 :, 0]
    assert len(completion.logprobs) == len(completion.token_ids) == len(expected) > 0
    return (expected - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().max().item()


def perturbed(hf: Qwen2_5_VLForConditionalGeneration, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """The same architecture, every tensor moved."""
    generator = torch.Generator().manual_seed(seed)
    moved = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in hf.state_dict().items()}
    other = Qwen2_5_VLForConditionalGeneration(hf.config).eval()
    other.load_state_dict(moved)
    return other


@pytest.fixture
def own_weights(engine: Engine, hf: Qwen2_5_VLForConditionalGeneration, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine serves the checkpoint again after the test."""
    yield
    monkeypatch.undo()
    engine.load_weights(iter(hf.state_dict().items()), version=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_policy(engine: Engine, hf, renderer: Renderer, temperature: float) -> None:  # noqa: ANN001
    """Text only, one image, two images of different sizes; then a second turn with another image in the grown context."""
    sequences = prompts(renderer)
    for turn in range(2):
        samplings = [Sampling(max_tokens=12, temperature=temperature, seed=10 * turn + i) for i in range(len(sequences))]
        completions = generate(engine, sequences, samplings)
        for index, (sequence, completion) in enumerate(zip(sequences, completions, strict=True)):
            difference = gap(hf, sequence, completion, temperature=temperature, renderer=renderer)
            print(f"temperature {temperature} turn {turn} sequence {index}: {difference:.1e}")
            assert difference <= BOUND
            sequence.extend(completion.token_ids, logprobs=completion.logprobs)
            renderer.follow(sequence, [user("And this?", picture(7 + index, 84, 56))])


def test_greedy_is_hf_argmax(engine: Engine, hf, renderer: Renderer) -> None:  # noqa: ANN001
    for sequence in prompts(renderer):
        (completion,) = generate(engine, [sequence], [Sampling(max_tokens=8, temperature=0.0, seed=0)])
        token_ids = list(sequence.token_ids)
        for token in completion.token_ids:
            logits = policy_logits(hf, token_ids, sequence.images, renderer=renderer)[-1]
            assert token == logits.argmax().item()
            token_ids.append(token)


def test_frequencies_follow_the_probabilities(engine: Engine, hf, renderer: Renderer) -> None:  # noqa: ANN001
    """3000 seeds at temperature 2: chi-squared of the first tokens, and of the second ones after the 20 most frequent first ones."""
    sequence, num = prompts(renderer)[1], 3000

    def probability(token_ids: list[int]) -> torch.Tensor:
        return policy_logits(hf, token_ids, sequence.images, renderer=renderer)[-1].div(2).softmax(-1)

    completions = generate(engine, [sequence] * num, [Sampling(max_tokens=2, temperature=2.0, seed=seed) for seed in range(num)])
    first = Counter(c.token_ids[0] for c in completions)
    assert not {token for c in completions for token in c.token_ids} & set(renderer.banned_ids)
    check_frequencies(num * probability(sequence.token_ids), first)
    contexts = [token for token, _ in first.most_common() if token not in renderer.stop_ids][:20]
    expected = sum(first[token] * probability([*sequence.token_ids, token]) for token in contexts)
    check_frequencies(expected, Counter(c.token_ids[1] for c in completions if c.token_ids[0] in contexts))


def check_frequencies(expected: torch.Tensor, counts: Counter[int]) -> None:
    """Bins of tokens that are expected about 10 times or more together. The 1e-4 quantile of chi-squared lies below its mean and 5 deviations."""
    order = expected.argsort(descending=True)
    bins = (expected[order].cumsum(0) / 10).long().unique(return_inverse=True)[1]
    seen = torch.tensor([counts[token] for token in order.tolist()], dtype=torch.float64)
    expected_B, seen_B = (torch.zeros(int(bins[-1]) + 1, dtype=torch.float64).index_add(0, bins, each) for each in (expected[order], seen))
    chi_squared, freedom = ((seen_B - expected_B) ** 2 / expected_B).sum().item(), len(expected_B) - 1
    print(f"chi-squared {chi_squared:.1f} at {freedom} degrees of freedom")
    assert freedom >= 10 and chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_a_seed_decides_whatever_the_company(engine: Engine, renderer: Renderer) -> None:
    """Alone, among 200 others (where prompts are computed in parts), and with the caches warm: the same tokens; other seeds, other tokens."""
    sequences = prompts(renderer)
    samplings = [Sampling(max_tokens=16, temperature=1.0, seed=2**62 + i) for i in range(4)]
    alone = [generate(engine, [s], [sampling])[0].token_ids for s, sampling in zip(sequences, samplings, strict=True)]
    engine.sleep()
    engine.wake()
    crowd = [renderer.prompt([user("Crowd.", picture(100 + i, 224, 224))]) for i in range(70)]
    others = [Sampling(max_tokens=3, temperature=1.0, seed=i) for i in range(70)]
    together = generate(engine, crowd + sequences, others + samplings)
    assert [c.token_ids for c in together[70:]] == alone
    reseeded = generate(engine, sequences, [Sampling(max_tokens=16, temperature=1.0, seed=i) for i in range(4)])
    assert all(c.token_ids != ids for c, ids in zip(reseeded, alone, strict=True))


def test_exactly_the_stop_ids_end_a_turn(engine: Engine, renderer: Renderer) -> None:
    """The stop id is part of the turn; the tokenizer's other end tokens are tokens like any other; the rest ran to max_tokens."""
    (stop,) = renderer.stop_ids
    other_end = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    num = 400
    completions = generate(engine, prompts(renderer)[:1] * num, [Sampling(max_tokens=24, temperature=2.0, seed=i) for i in range(num)])
    finished = [c for c in completions if c.finished]
    assert len(finished) > 3
    assert all(c.token_ids[-1] == stop and c.token_ids.count(stop) == 1 for c in finished)
    assert all(stop not in c.token_ids and len(c.token_ids) == 24 for c in completions if not c.finished)
    assert any(other_end in c.token_ids[:-1] for c in completions)


def test_a_full_context_is_unfinished(engine: Engine, renderer: Renderer) -> None:
    long = Sequence(token_ids=[65] * 1020)
    full = Sequence(token_ids=[65] * 1024)
    room, none = generate(engine, [long, full], [Sampling(max_tokens=64, temperature=1.0, seed=1)] * 2)
    assert (len(room.token_ids), room.finished) == (4, False)
    assert (none.token_ids, none.finished) == ([], False)


def test_the_engine_sees_what_vllms_own_processor_would_make(engine: Engine, renderer: Renderer) -> None:
    """vLLM's processor on the pictures and one placeholder each, against the expanded ids, patches and positions that we hand over."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    from megatron_rl.rollout.engine import placeholder_offsets

    sequence = prompts(renderer)[2]
    own = renderer.image_token_id
    collapsed = [t for i, t in enumerate(sequence.token_ids) if t != own or sequence.token_ids[i - 1] != own]
    limits = {"size": {"shortest_edge": renderer.min_pixels, "longest_edge": renderer.max_pixels}}
    data = {"image": [image.picture for image in sequence.images]}
    raw = {"prompt_token_ids": collapsed, "multi_modal_data": data, "mm_processor_kwargs": limits}
    llm = engine._core._llm
    (theirs,) = llm.renderer.render_cmpl([parse_model_prompt(llm.model_config, raw)], llm.renderer.default_cmpl_tok_params)
    assert theirs["prompt_token_ids"] == sequence.token_ids
    offsets = placeholder_offsets(sequence.token_ids, sequence.images, image_token_id=own)
    ranges = [(place.offset, place.length) for place in theirs["mm_placeholders"]["image"]]
    assert ranges == [(offset, image.num_tokens) for offset, image in zip(offsets, sequence.images, strict=True)]
    for item, image in zip(theirs["mm_kwargs"]["image"], sequence.images, strict=True):
        torch.testing.assert_close(item["pixel_values"].data, image.patch_PC, rtol=0, atol=1e-6)
        assert tuple(item["image_grid_thw"].data.tolist()) == image.grid


def test_wrong_placeholders_are_refused(engine: Engine, renderer: Renderer) -> None:
    """One too few, an image too many, one too few: both lengths and the first difference are named."""
    sequence = prompts(renderer)[2]
    length, own = len(sequence.token_ids), renderer.image_token_id
    start = sequence.token_ids.index(own)
    first, second = sequence.images
    cases = [
        (sequence.token_ids[:start] + sequence.token_ids[start + 1 :], sequence.images, length - 1, length, start + first.num_tokens - 1),
        (sequence.token_ids, [second, first], length, length, start + second.num_tokens),
        (sequence.token_ids, [first], length, length - second.num_tokens, sequence.token_ids.index(own, start + first.num_tokens)),
        ([5, 6], [second], 2, 2 + second.num_tokens, 2),
    ]
    for token_ids, images, given, expanded, difference in cases:
        with pytest.raises(RuntimeError, match=f"has {given} tokens, but {expanded} when .* differ at position {difference}$"):
            generate(engine, [Sequence(token_ids=token_ids, images=images)], [Sampling(max_tokens=1, temperature=1.0, seed=0)])


def test_a_refused_request_leaves_the_others_alone(engine: Engine, renderer: Renderer) -> None:
    (sequence, *_) = prompts(renderer)

    async def main() -> list:
        calls = (engine.generate(sequence.token_ids, [], Sampling(max_tokens=3, temperature=t, seed=0)) for t in (1.0, 5.0))
        return await asyncio.gather(*calls, return_exceptions=True)

    completion, refused = engine.run(main())
    assert len(completion.token_ids) == 3
    assert isinstance(refused, ValueError) and "temperature" in str(refused)


def test_weights_are_replaced(engine: Engine, hf, renderer: Renderer, own_weights: None) -> None:  # noqa: ANN001
    """Twice, on prompts the caches know: the logprobs are the new weights' and not the old ones'; names old and new, one bucket and many."""
    sequences = prompts(renderer)
    samplings = [Sampling(max_tokens=8, temperature=1.0, seed=i) for i in range(len(sequences))]
    previous, bucket = hf, engine._core.weights._bucket_bytes
    for version, bucket_bytes in ((1, bucket), (2, 100_000)):
        current = perturbed(hf, version)
        engine._core.weights._bucket_bytes = bucket_bytes
        engine.load_weights(iter(current.state_dict().items()), version=version)
        completions = generate(engine, sequences, samplings)
        assert {c.weight_version for c in completions} == {version}
        for sequence, completion in zip(sequences, completions, strict=True):
            assert gap(current, sequence, completion, temperature=1.0, renderer=renderer) <= BOUND
            assert gap(previous, sequence, completion, temperature=1.0, renderer=renderer) > 100 * BOUND
        previous = current
    engine._core.weights._bucket_bytes = bucket


def test_buckets_bound_what_is_held(engine: Engine, hf, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """The iterator is drawn one bucket ahead of the loader, never further."""
    weights, drawn, largest = engine._core.weights, 0, 0
    deliver = weights.deliver

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal drawn, largest
        for name, tensor in hf.state_dict().items():
            drawn += tensor.nbytes
            largest = max(largest, drawn)
            yield name, tensor

    def counted(bucket: Tensors) -> None:
        nonlocal drawn
        assert drawn == sum(tensor.nbytes for _, tensor in bucket)
        drawn = 0
        deliver(bucket)

    monkeypatch.setattr(weights, "_bucket_bytes", 300_000)
    monkeypatch.setattr(weights, "deliver", counted)
    engine.load_weights(tensors(), version=0)
    assert 300_000 <= largest < 300_000 + max(tensor.nbytes for tensor in hf.state_dict().values())


def test_one_flipped_bit_of_any_tensor_is_noticed(engine: Engine, hf, monkeypatch: pytest.MonkeyPatch, own_weights: None) -> None:  # noqa: ANN001
    """Between sender and loader, in each tensor in turn, at a bit that moves from the first element's lowest to the last one's highest."""
    tensors = hf.state_dict()
    deliver, names = engine._core.weights.deliver, list(tensors)
    assert len(names) > 70
    for index, name in enumerate(names):
        spoiled = tensors[name].clone()
        words = spoiled.view(-1).view(torch.int32)
        words[index * (len(words) - 1) // (len(names) - 1)] ^= -(2**31) if index % 32 == 31 else 1 << index % 32
        monkeypatch.setattr(engine._core.weights, "deliver", lambda bucket: deliver([(n, spoiled if n == name else t) for n, t in bucket]))
        with pytest.raises(RuntimeError, match=f"does not hold what was sent: {name}$"):
            engine.load_weights(iter(tensors.items()), version=1)


def swap(one: str, other: str) -> Callable[[Tensors], Tensors]:
    names = {one: other, other: one}
    return lambda bucket: [(names.get(name, name), tensor) for name, tensor in bucket]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        ("input_layernorm.weight", "post_attention_layernorm.weight"),
    ],
)
def test_swapped_tensors_are_noticed(engine: Engine, hf, one: str, other: str, monkeypatch: pytest.MonkeyPatch, own_weights: None) -> None:  # noqa: ANN001
    """Same shapes, other places: the loader does not mind, the check does, and names both."""
    deliver, stem = engine._core.weights.deliver, "model.language_model.layers.1."
    swapped = swap(stem + one, stem + other)
    monkeypatch.setattr(engine._core.weights, "deliver", lambda bucket: deliver(swapped(bucket)))
    current = perturbed(hf, 3)
    with pytest.raises(RuntimeError, match="does not hold what was sent") as caught:
        engine.load_weights(iter(current.state_dict().items()), version=1)
    assert stem + one in str(caught.value) and stem + other in str(caught.value)


def test_q_and_k_swapped_by_the_sender_are_refused(engine: Engine, hf, own_weights: None) -> None:  # noqa: ANN001
    stem = "model.language_model.layers.0.self_attn."
    swapped = swap(stem + "q_proj.weight", stem + "k_proj.weight")(list(hf.state_dict().items()))
    with pytest.raises(RuntimeError, match=r"_proj.weight was sent as \(\d+, 128\), the engine's is"):
        engine.load_weights(iter(swapped), version=1)


def test_every_tensor_is_sent_exactly_once(engine: Engine, hf, own_weights: None) -> None:  # noqa: ANN001
    tensors = hf.state_dict()
    names = list(tensors)
    for missing in ("lm_head.weight", "model.language_model.layers.2.self_attn.k_proj.bias", "model.visual.merger.ln_q.weight"):
        with pytest.raises(RuntimeError, match=f"1 tensors were not sent: {missing}$"):
            engine.load_weights(((n, tensors[n]) for n in names if n != missing), version=1)
    with pytest.raises(RuntimeError, match="the engine has no place for model.language_model.layers.9.mlp.up_proj.weight"):
        engine.load_weights(iter([*tensors.items(), ("model.language_model.layers.9.mlp.up_proj.weight", tensors[names[0]])]), version=1)
    with pytest.raises(RuntimeError, match=f"{names[5]} was sent twice"):
        engine.load_weights(iter([*tensors.items(), (names[5], tensors[names[5]])]), version=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (129, 257)])
def test_checksum_sees_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every bit of small tensors, a sample of large ones; and the order of elements."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = tensor.clone().view(-1).view(torch.uint8)
    reference = checksum(tensor)
    for bit in range(0, 8 * len(data), max(1, len(data) // 64)):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data.view(dtype).view(shape)) != reference
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data.view(dtype).view(shape)) == reference
    if tensor.numel() > 1:
        assert checksum(tensor.flatten().roll(1)) != reference


def test_an_exception_comes_out_of_run(engine: Engine, renderer: Renderer) -> None:
    """And the requests that were under way are gone."""
    (sequence, *_) = prompts(renderer)

    async def main() -> None:
        waiting = asyncio.create_task(engine.generate(sequence.token_ids, [], Sampling(max_tokens=900, temperature=1.0, seed=0)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.run(main())
    assert not engine._core.is_busy()


def test_a_failing_step_fails_all_who_wait(engine: Engine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in flight and those who come later, each with a HostFault; no one waits for ever."""
    monkeypatch.setattr(engine, "_error", None)
    sequences, steps, step = prompts(renderer), 0, engine._core.step

    def broken() -> list:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise OSError("no more memory")
        return step()

    async def main() -> list:
        sampling = Sampling(max_tokens=50, temperature=1.0, seed=0)
        outcomes = await asyncio.gather(*(engine.generate(s.token_ids, s.images, sampling) for s in sequences), return_exceptions=True)
        late = await asyncio.gather(engine.generate(sequences[0].token_ids, [], sampling), return_exceptions=True)
        return outcomes + late

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", broken)
        outcomes = engine.run(main())
    assert len(outcomes) == len(sequences) + 1
    assert all(isinstance(outcome, HostFault) and "no more memory" in str(outcome) for outcome in outcomes)
    engine._core.abort([str(index) for index in range(next(engine._ids))])
    assert not engine._core.is_busy()


def test_cancelling_aborts_the_request(engine: Engine, renderer: Renderer) -> None:
    """The others end as they would have without it."""
    sequences = prompts(renderer)[1:3]
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=5)
    alone = [c.token_ids for c in generate(engine, sequences, [sampling] * 2)]

    async def main() -> list[Completion]:
        long = asyncio.create_task(engine.generate(sequences[0].token_ids, sequences[0].images, Sampling(max_tokens=900, temperature=1.0, seed=1)))
        others = [asyncio.create_task(engine.generate(s.token_ids, s.images, sampling)) for s in sequences]
        await asyncio.sleep(0.02)
        long.cancel()
        completions = await asyncio.gather(*others)
        await asyncio.sleep(0.02)
        assert long.cancelled() and not engine._core.is_busy()
        return completions

    assert [c.token_ids for c in engine.run(main())] == alone


def test_an_idle_engine_does_not_spin_and_a_slow_tool_delays_only_its_own(engine: Engine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    (sequence, *_) = prompts(renderer)
    turns, turn, order = 0, engine._turn, []

    def counted() -> object:
        nonlocal turns
        turns += 1
        return turn()

    async def episode(name: str, delay: float) -> None:
        for index in range(2):
            await engine.generate(sequence.token_ids, [], Sampling(max_tokens=4, temperature=1.0, seed=index))
            await asyncio.sleep(delay)
        order.append(name)

    async def main() -> None:
        await asyncio.gather(episode("slow", 0.4), episode("fast", 0.0), episode("quick", 0.01))

    monkeypatch.setattr(engine, "_turn", counted)
    engine.run(main())
    assert order[-1] == "slow"
    assert turns < 40, "16 steps of 3 episodes of 2 turns of 4 tokens at most, and a wake-up each"


def test_sleep_and_wake_change_nothing(engine: Engine, renderer: Renderer) -> None:
    sequences = prompts(renderer)
    samplings = [Sampling(max_tokens=8, temperature=1.0, seed=i) for i in range(len(sequences))]
    before = generate(engine, sequences, samplings)
    engine.sleep()
    engine.wake()
    after = generate(engine, sequences, samplings)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_training_beside_the_engine_works(engine: Engine, renderer: Renderer, hf) -> None:  # noqa: ANN001
    """Autograd, default dtype and the number of threads are the trainer's, also while rollouts go on."""
    generate(engine, prompts(renderer), [Sampling(max_tokens=2, temperature=1.0, seed=0)] * 4)
    weight = torch.full((3,), 2.0, requires_grad=True)
    (weight**3).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 12.0))
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    with torch.no_grad():
        held = dict(engine._core.weights._model.named_parameters())["language_model.model.norm.weight"]
        assert torch.equal(held, hf.state_dict()["model.language_model.norm.weight"])


def test_busy_seconds_only_grow(engine: Engine, renderer: Renderer) -> None:
    before = engine.busy_s
    generate(engine, prompts(renderer), [Sampling(max_tokens=2, temperature=1.0, seed=0)] * 4)
    assert before < engine.busy_s


def test_cuda_without_cuda_is_refused(random_model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ValueError, match="engine.device=cuda: .*use auto or cpu"):
        Engine(str(random_model), EngineSettings(device="cuda"), image_token_id=1, banned_ids=[], stop_ids=[], group=None)


def test_importing_the_engine_does_not_import_vllm() -> None:
    code = "import sys, megatron_rl.types, megatron_rl.rollout.engine; print(sorted(m for m in sys.modules if m.partition('.')[0] == 'vllm'))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("tp", [1, 2])
def test_two_processes_under_random_tool_delays(tp: int, engine: Engine, renderer: Renderer, random_model: Path, torchrun, tmp_path: Path) -> None:  # noqa: ANN001
    """Two engines side by side, and one over both ranks: greedy episodes of several turns equal those of a single process, whatever the delays."""
    expected = [list(s.token_ids) for s in prompts(renderer) * 2]
    sequences = [Sequence(list(s.token_ids), images=list(s.images)) for s in prompts(renderer) * 2]
    turns: list[list] = [[] for _ in sequences]
    for _ in range(3):
        completions = generate(engine, sequences, [Sampling(max_tokens=6, temperature=0.0, seed=0)] * len(sequences))
        for sequence, completion, turn in zip(sequences, completions, turns, strict=True):
            sequence.token_ids += completion.token_ids
            turn.append(completion)
    assert [s.token_ids[: len(ids)] for s, ids in zip(sequences, expected, strict=True)] == expected
    torchrun(2, Path(__file__).parent / "engine_world.py", random_model, tp, tmp_path / "turns", timeout_s=150)
    files = sorted(tmp_path.glob("turns.*"))
    assert len(files) == (4 if tp == 1 else 2)
    for file in files:
        for own, theirs in zip(turns, json.loads(file.read_text()), strict=True):
            for completion, (token_ids, logprobs) in zip(own, theirs, strict=True):
                assert token_ids == completion.token_ids
                assert logprobs == pytest.approx(completion.logprobs, abs=1e-5)
