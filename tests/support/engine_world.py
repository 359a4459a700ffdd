"""An engine on every rank (tp 1) or one engine over all ranks (tp 2), with random tool delays. Run
under torchrun by test_engine_world.py.

Arguments: model folder, engine.tp, and the file to which the leader of each engine writes its
greedy completions (each rank appends its own suffix).
"""

import asyncio
import json
import random
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.parallel_state import get_tp_group, get_world_group

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from tests.support.packed_example import make_prompts

TURNS = 3


async def generate_turns(engine: ColocatedEngine, context: TokenSequence, *, delay: random.Random, index: int) -> list[Completion]:
    """Generate several turns of a growing sequence, with a tool call of random duration before
    each.
    """
    completions = []
    for _ in range(TURNS):
        await asyncio.sleep(delay.random() * 0.05)
        completions.append(
            await engine.generate(context.token_ids, context.images, SamplingSettings(max_tokens=6, temperature=0.0, seed=index))
        )
        context.extend(completions[-1].token_ids, logprobs=completions[-1].logprobs)
    return completions


async def generate_all(engine: ColocatedEngine, renderer: Renderer, *, delay: random.Random) -> list[list[Completion]]:
    contexts = make_prompts(renderer) * 2
    fresh = [
        TokenSequence(list(s.token_ids), list(s.loss_mask), list(s.rollout_logprobs), list(s.weight_versions), list(s.images))
        for s in contexts
    ]
    return await asyncio.gather(*(generate_turns(engine, context, delay=delay, index=i) for i, context in enumerate(fresh)))


async def fail_after_a_turn(engine: ColocatedEngine, renderer: Renderer) -> None:
    waiting = asyncio.create_task(generate_all(engine, renderer, delay=random.Random(0)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    raise KeyError("a broken task")


def expect_error(error_type: type[BaseException], message: str, call: object, *arguments: object, **keywords: object) -> None:
    with pytest.raises(error_type, match=re.escape(message)):
        call(*arguments, **keywords)


def main(model: str, tp: int, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    renderer = Renderer(ModelSettings(path=model))
    group = dist.group.WORLD if tp > 1 else None
    engine = ColocatedEngine(
        model, EngineSettings(tp=tp, max_num_seqs=16, kv_cache_mib=16),
        special_tokens=renderer.special_tokens, group=group, timeout_s=76.5,
    )  # fmt: skip
    limits = {place.cpu_group._get_backend(torch.device("cpu")).options._timeout for place in (get_world_group(), get_tp_group())}
    assert limits == {timedelta(seconds=77)}, "vLLM's groups wait as long as they are told"
    leads = tp == 1 or rank == 0
    for attempt in range(2):
        result = engine.run(generate_all(engine, renderer, delay=random.Random(100 * attempt + rank)))
        assert (result is not None) == leads
        if leads:
            turns = [[[c.token_ids, c.logprobs] for c in completions] for completions in result]
            Path(f"{out}.{rank}.{attempt}").write_text(json.dumps(turns))

    tensors = load_file(Path(model) / "model.safetensors")
    engine.load_weights(iter(tensors.items()), version=1)
    corrupt_transfer(engine, tensors, rank=rank)
    engine.load_weights(iter(tensors.items()), version=2)

    kind, text = (KeyError, "a broken task") if leads else (RuntimeError, "a broken task")
    expect_error(kind, text, engine.run, fail_after_a_turn(engine, renderer))
    again = engine.run(generate_all(engine, renderer, delay=random.Random(7)))
    if leads:
        assert [[c.token_ids for c in turns] for turns in again] == [[c.token_ids for c in turns] for turns in result]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size(), "the trainer's group still works beside the engine"
    engine.close()


def corrupt_transfer(engine: ColocatedEngine, tensors: dict[str, torch.Tensor], *, rank: int) -> None:
    """Flip one bit of a tensor on its way to the last rank.

    This rank must report the tensor by name; a rank that holds another slice of the tensor must not
    fail.
    """
    deliver = engine._core.weights.load_bucket
    for name in ("model.language_model.layers.0.self_attn.o_proj.weight", "model.visual.blocks.0.attn.qkv.weight", "lm_head.weight"):

        def flip(bucket: list[tuple[str, torch.Tensor]], name: str = name) -> None:
            bits = dict(bucket)[name].clone()
            bits.view(-1).view(torch.int32)[-1] ^= 1
            deliver([(other, bits if other == name else tensor) for other, tensor in bucket])

        engine._core.weights.load_bucket = flip
        if rank == dist.get_world_size() - 1:
            expect_error(RuntimeError, f"differ from the sent weights: {name}", engine.load_weights, iter(tensors.items()), version=9)
        else:
            load_on_other_ranks(engine, tensors)
    engine._core.weights.load_bucket = deliver


def load_on_other_ranks(engine: ColocatedEngine, tensors: dict[str, torch.Tensor]) -> None:
    """Engines with tp 1 all hold the corrupted element, so all fail.

    With a tensor sharded over two ranks, only the last rank fails.
    """
    if engine._group is None:
        expect_error(RuntimeError, "differ from the sent weights", engine.load_weights, iter(tensors.items()), version=9)
    else:
        engine.load_weights(iter(tensors.items()), version=9)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
