"""The engine against Hugging Face: samples, logprobs, independence of concurrent requests, and
rejected requests."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration as HF

from megatron_rl.errors import InfraError
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import Completion, SamplingSettings, placeholder_offsets
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, check_frequencies, generate_all, max_logprob_diff, policy_logits
from tests.support.packed_example import make_picture, make_prompts, user_message


@pytest.mark.known_failure("text-only-samples")
@pytest.mark.known_failure("temperature-ignored")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_policy(engine: ColocatedEngine, hf: HF, renderer: Renderer, temperature: float) -> None:
    """Logprobs equal HF's for text only, one image, and two images of different sizes, and for a
    second turn with another image."""
    contexts = make_prompts(renderer)
    for turn in range(2):
        samplings = [SamplingSettings(max_tokens=12, temperature=temperature, seed=10 * turn + i) for i in range(len(contexts))]
        completions = generate_all(engine, contexts, samplings)
        for index, (context, completion) in enumerate(zip(contexts, completions, strict=True)):
            difference = max_logprob_diff(hf, context, completion, temperature=temperature, renderer=renderer)
            print(f"temperature {temperature} turn {turn} sequence {index}: {difference:.1e}")
            assert difference <= LOGPROB_BOUND
            context.extend(completion.token_ids, logprobs=completion.logprobs)
            more = renderer.observation(context, [user_message("And this?", make_picture(7 + index, 84, 56))])
            context.extend(more.token_ids, images=tuple(more.images))


def test_greedy_is_hf_argmax(engine: ColocatedEngine, hf: HF, renderer: Renderer) -> None:
    """Greedy samples are the argmax of HF's logits."""
    for context in make_prompts(renderer):
        (completion,) = generate_all(engine, [context], [SamplingSettings(max_tokens=8, temperature=0.0, seed=0)])
        token_ids = list(context.token_ids)
        for token in completion.token_ids:
            logits = policy_logits(hf, token_ids, context.images, renderer=renderer)[-1]
            assert token == logits.argmax().item()
            token_ids.append(token)


@pytest.mark.known_failure("image-token-sampled")
def test_frequencies_follow_the_probabilities(engine: ColocatedEngine, hf: HF, renderer: Renderer) -> None:
    check_sampled_frequencies(engine, hf, renderer, num=3000)


def check_sampled_frequencies(engine: ColocatedEngine, hf: HF, renderer: Renderer, *, num: int) -> None:
    """Sampled frequencies follow HF's probabilities by a chi-squared test, over `num` seeds at
    temperature 2. First tokens are tested, and second tokens after the 20 most frequent first
    tokens."""
    context = make_prompts(renderer)[1]

    def probability(token_ids: list[int]) -> torch.Tensor:
        return policy_logits(hf, token_ids, context.images, renderer=renderer)[-1].div(2).softmax(-1)

    completions = generate_all(engine, [context] * num, [SamplingSettings(max_tokens=2, temperature=2.0, seed=seed) for seed in range(num)])
    first = Counter(c.token_ids[0] for c in completions)
    assert not {token for c in completions for token in c.token_ids} & set(renderer.banned_ids)
    check_frequencies(num * probability(context.token_ids), first)
    contexts = [token for token, _ in first.most_common() if token not in renderer.stop_ids][:20]
    expected = sum(first[token] * probability([*context.token_ids, token]) for token in contexts)
    check_frequencies(expected, Counter(c.token_ids[1] for c in completions if c.token_ids[0] in contexts))


def test_the_prompt_of_a_group_is_computed_once(engine: ColocatedEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of a group is computed once; later requests find its complete blocks in the cache.

    Samples equal those of each request alone.
    """
    contexts = [make_prompts(renderer)[1]] * 5 + [make_prompts(renderer)[2]] + [make_prompts(renderer)[1]]
    samplings = [SamplingSettings(max_tokens=12, temperature=1.0, seed=i) for i in range(len(contexts))]
    alone = [generate_all(engine, [context], [sampling])[0].token_ids for context, sampling in zip(contexts, samplings, strict=True)]
    engine._core._reset_caches()
    cached, step = {}, engine._core._engine.step

    def watched() -> list:
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(engine._core._engine, "step", watched)
    assert [completion.token_ids for completion in generate_all(engine, contexts, samplings)] == alone
    whole = len(contexts[0].token_ids) // 32 * 32
    assert whole > 0 and sorted(cached.values()) == [0, 0] + [whole] * 5


def test_a_seed_decides_whatever_the_company(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Samples depend on the seed only.

    They are the same alone and after 70 prompts with images, which exceed one step, so that prompts
    are computed in parts. Other seeds give other tokens.
    """
    contexts = make_prompts(renderer)
    samplings = [SamplingSettings(max_tokens=16, temperature=1.0, seed=2**62 + i) for i in range(len(contexts))]
    alone = [generate_all(engine, [s], [sampling])[0].token_ids for s, sampling in zip(contexts, samplings, strict=True)]
    engine.sleep()
    engine.wake()
    crowd = [renderer.prompt([user_message("Crowd.", make_picture(100 + i, 224, 224))]) for i in range(70)]
    others = [SamplingSettings(max_tokens=3, temperature=1.0, seed=i) for i in range(70)]
    together = generate_all(engine, crowd + contexts, others + samplings)
    assert [c.token_ids for c in together[70:]] == alone
    reseeded = generate_all(engine, contexts, [SamplingSettings(max_tokens=16, temperature=1.0, seed=i) for i in range(len(contexts))])
    assert all(c.token_ids != ids for c, ids in zip(reseeded, alone, strict=True))


def test_exactly_the_stop_ids_end_a_turn(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Only the stop ids end a turn, and the stop id is part of the turn.

    The tokenizer's other end tokens do not end it; all other turns run to max_tokens.
    """
    (stop,) = renderer.stop_ids
    other_end = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    num = 400
    completions = generate_all(
        engine, make_prompts(renderer)[:1] * num, [SamplingSettings(max_tokens=24, temperature=2.0, seed=i) for i in range(num)]
    )
    finished = [c for c in completions if c.is_stopped]
    assert len(finished) > 3
    assert all(c.token_ids[-1] == stop and c.token_ids.count(stop) == 1 for c in finished)
    assert all(stop not in c.token_ids and len(c.token_ids) == 24 for c in completions if not c.is_stopped)
    assert any(other_end in c.token_ids[:-1] for c in completions)


@pytest.mark.known_failure("stop-text-missed")
def test_a_stop_text_ends_a_turn_and_stays_in_it(engine: ColocatedEngine, renderer: Renderer) -> None:
    """With stop texts, a turn equals the turn without them up to the token that completes a stop
    text. Samples depend on seed and position only."""
    stop, num = ("z", "the"), 100
    free = [SamplingSettings(max_tokens=24, temperature=2.0, seed=i) for i in range(num)]
    whole = generate_all(engine, make_prompts(renderer)[:1] * num, free)
    stopped = generate_all(engine, make_prompts(renderer)[:1] * num, [replace(sampling, stop=stop) for sampling in free])
    early = 0
    for sampled, cut in zip(whole, stopped, strict=True):
        length = next((n for n in range(1, 25) if any(text in renderer.tokenizer.decode(sampled.token_ids[:n]) for text in stop)), None)
        assert cut.token_ids == sampled.token_ids[:length]
        assert cut.logprobs == pytest.approx(sampled.logprobs[:length], abs=1e-5)
        assert cut.is_stopped == (length is not None or sampled.is_stopped)
        early += length is not None and length < len(sampled.token_ids)
    assert 10 < early < num


def test_a_full_context_is_unfinished(engine: ColocatedEngine, renderer: Renderer) -> None:
    """A response that reaches max_model_len is not stopped, and a full sequence gets an empty
    response."""
    long = TokenSequence(token_ids=[65] * 1020)
    full = TokenSequence(token_ids=[65] * 1024)
    room, none = generate_all(engine, [long, full], [SamplingSettings(max_tokens=64, temperature=1.0, seed=1)] * 2)
    assert (len(room.token_ids), room.is_stopped) == (4, False)
    assert (none.token_ids, none.is_stopped) == ([], False)


@pytest.mark.known_failure("two-image-processors")
def test_the_engine_sees_what_vllms_own_processor_would_make(engine: ColocatedEngine, renderer: Renderer) -> None:
    """The expanded ids, patches and positions passed to vLLM equal those of vLLM's processor, which
    gets the images and one placeholder per image."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    context = make_prompts(renderer)[2]
    own = renderer.image_token_id
    collapsed = [t for i, t in enumerate(context.token_ids) if t != own or context.token_ids[i - 1] != own]
    limits = {"size": {"shortest_edge": renderer.min_pixels, "longest_edge": renderer.max_pixels}}
    data = {"image": [image.pil for image in context.images]}
    raw = {"prompt_token_ids": collapsed, "multi_modal_data": data, "mm_processor_kwargs": limits}
    llm = engine._core._llm
    (theirs,) = llm.renderer.render_cmpl([parse_model_prompt(llm.model_config, raw)], llm.renderer.default_cmpl_tok_params)
    assert theirs["prompt_token_ids"] == context.token_ids
    offsets = placeholder_offsets(context.token_ids, context.images, image_token_id=own)
    ranges = [(place.offset, place.length) for place in theirs["mm_placeholders"]["image"]]
    assert ranges == [(offset, image.num_tokens) for offset, image in zip(offsets, context.images, strict=True)]
    for item, image in zip(theirs["mm_kwargs"]["image"], context.images, strict=True):
        torch.testing.assert_close(item["pixel_values"].data, image.patch_PC, rtol=0, atol=1e-6)
        assert tuple(item["image_grid_thw"].data.tolist()) == image.grid


@pytest.mark.known_failure("placeholders-expanded-otherwise")
def test_wrong_placeholders_are_refused(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Placeholders that do not match the images are rejected, with both lengths and the first
    differing position. Cases: one placeholder token missing, images in the wrong order, one image
    missing, and an image without placeholders."""
    context = make_prompts(renderer)[2]
    length, own = len(context.token_ids), renderer.image_token_id
    start = context.token_ids.index(own)
    first, second = context.images
    cases = [
        (context.token_ids[:start] + context.token_ids[start + 1 :], context.images, length - 1, length, start + first.num_tokens - 1),
        (context.token_ids, [second, first], length, length, start + second.num_tokens),
        (context.token_ids, [first], length, length - second.num_tokens, context.token_ids.index(own, start + first.num_tokens)),
        ([5, 6], [second], 2, 2 + second.num_tokens, 2),
    ]
    for token_ids, images, given, expanded, difference in cases:
        with pytest.raises(RuntimeError, match=f"has {given} tokens, but needs {expanded} .* difference is at position {difference}$"):
            generate_all(
                engine, [TokenSequence(token_ids=token_ids, images=images)], [SamplingSettings(max_tokens=1, temperature=1.0, seed=0)]
            )


def test_a_refused_request_leaves_the_others_alone(engine: ColocatedEngine, renderer: Renderer) -> None:
    """A request with an invalid temperature raises ValueError, and a concurrent request
    completes."""
    (context, *_) = make_prompts(renderer)

    async def main() -> list:
        calls = (engine.generate(context.token_ids, [], SamplingSettings(max_tokens=3, temperature=t, seed=0)) for t in (1.0, 5.0))
        return await asyncio.gather(*calls, return_exceptions=True)

    completion, refused = engine.run(main())
    assert len(completion.token_ids) == 3
    assert isinstance(refused, ValueError) and "temperature" in str(refused)


def test_an_exception_comes_out_of_run(engine: ColocatedEngine, renderer: Renderer) -> None:
    """An exception in the coroutine propagates out of `run`, and pending requests are aborted."""
    (context, *_) = make_prompts(renderer)

    async def main() -> None:
        waiting = asyncio.create_task(engine.generate(context.token_ids, [], SamplingSettings(max_tokens=900, temperature=1.0, seed=0)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.run(main())
    assert not engine._core.is_busy()


def test_a_failing_step_fails_all_who_wait(engine: ColocatedEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine step fails, all requests in flight and all later requests raise InfraError
    instead of blocking."""
    monkeypatch.setattr(engine, "_error", None)
    contexts, steps, step = make_prompts(renderer), 0, engine._core.step

    def broken() -> list:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise OSError("no more memory")
        return step()

    async def main() -> list:
        sampling = SamplingSettings(max_tokens=50, temperature=1.0, seed=0)
        outcomes = await asyncio.gather(*(engine.generate(s.token_ids, s.images, sampling) for s in contexts), return_exceptions=True)
        late = await asyncio.gather(engine.generate(contexts[0].token_ids, [], sampling), return_exceptions=True)
        return outcomes + late

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", broken)
        outcomes = engine.run(main())
    assert len(outcomes) == len(contexts) + 1
    assert all(isinstance(outcome, InfraError) and "no more memory" in str(outcome) for outcome in outcomes)
    engine._core.abort([str(index) for index in range(next(engine._ids))])
    assert not engine._core.is_busy()


def test_cancelling_aborts_the_request(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Cancelling a request aborts it and does not change the samples of the others."""
    contexts = make_prompts(renderer)[1:3]
    sampling = SamplingSettings(max_tokens=20, temperature=1.0, seed=5)
    alone = [c.token_ids for c in generate_all(engine, contexts, [sampling] * 2)]

    async def main() -> list[Completion]:
        endless = SamplingSettings(max_tokens=900, temperature=1.0, seed=1)
        long = asyncio.create_task(engine.generate(contexts[0].token_ids, contexts[0].images, endless))
        others = [asyncio.create_task(engine.generate(s.token_ids, s.images, sampling)) for s in contexts]
        await asyncio.sleep(0.02)
        long.cancel()
        completions = await asyncio.gather(*others)
        await asyncio.sleep(0.02)
        assert long.cancelled() and not engine._core.is_busy()
        return completions

    assert [c.token_ids for c in engine.run(main())] == alone


def test_a_slow_tool_delays_only_its_own(engine: ColocatedEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tool call delays only its own episode.

    The engine loop sleeps while no request is in flight.
    """
    (context, *_) = make_prompts(renderer)
    turns, turn, order = 0, engine._run_step, []

    def counted() -> object:
        nonlocal turns
        turns += 1
        return turn()

    async def episode(name: str, delay: float) -> None:
        for index in range(2):
            await engine.generate(context.token_ids, [], SamplingSettings(max_tokens=4, temperature=1.0, seed=index))
            await asyncio.sleep(delay)
        order.append(name)

    async def main() -> None:
        await asyncio.gather(episode("slow", 0.4), episode("fast", 0.0), episode("quick", 0.01))

    monkeypatch.setattr(engine, "_run_step", counted)
    engine.run(main())
    assert order[-1] == "slow"
    assert turns < 40, "16 steps of 3 episodes of 2 turns of 4 tokens at most, and a wake-up each"


@pytest.mark.known_failure("sleep-loses-weights")
def test_sleep_and_wake_change_nothing(engine: ColocatedEngine, renderer: Renderer) -> None:
    """Samples are the same before sleep and after wake."""
    contexts = make_prompts(renderer)
    samplings = [SamplingSettings(max_tokens=8, temperature=1.0, seed=i) for i in range(len(contexts))]
    before = generate_all(engine, contexts, samplings)
    engine.sleep()
    engine.wake()
    after = generate_all(engine, contexts, samplings)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_training_beside_the_engine_works(engine: ColocatedEngine, renderer: Renderer, hf: HF) -> None:
    """After a rollout, autograd, default dtype and number of threads are the trainer's, and the
    engine holds HF's weights."""
    generate_all(engine, make_prompts(renderer), [SamplingSettings(max_tokens=2, temperature=1.0, seed=0)] * len(make_prompts(renderer)))
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


def test_busy_seconds_only_grow(engine: ColocatedEngine, renderer: Renderer) -> None:
    """`busy_s` grows with every generation."""
    before = engine.busy_s
    generate_all(engine, make_prompts(renderer), [SamplingSettings(max_tokens=2, temperature=1.0, seed=0)] * len(make_prompts(renderer)))
    assert before < engine.busy_s
