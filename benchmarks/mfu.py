r"""Training speed and MFU of the policy with the shapes of released models.

    .venv/bin/python tools/data/make_shapes.py --size 7B --out runs/shapes/7B         # 16.6 GB
    torchrun --nproc_per_node 1 benchmarks/mfu.py --model runs/shapes/7B --dtype bfloat16 \
        --recompute full
    .venv/bin/python benchmarks/mfu.py --model runs/quickstart/nano --sequences 8 --text 100 \
        --image 140                                                                   # smoke test

Reports seconds per update, tokens per second, FLOP/s, MFU and peak memory. Every sequence has one
image and random text, half of which counts as sampled. With --group N, N consecutive sequences
share a prompt with its image, and the prompt is computed once per micro-batch. With --unshared,
each prompt starts with a different token, so only the image is shared; the size of the sequences
does not change. Tokens per second include the shared tokens of every sequence.

FLOPs include only tokens and patches that are computed; recomputation is not counted. Each token or
patch counts 6 FLOPs per parameter. The output layer counts only for sampled tokens, because it
computes no other logits. The attention of the language model adds 12 * layers * heads * head_dim *
(length^2 - shared^2) / 2 FLOPs per sequence. With LoRA adapters, the FLOPs per parameter are 4 in
the language model (no weight gradients) and 2 in the vision tower (no gradients at all); the
adapters themselves are not counted.
"""

import argparse
import os
import re
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image as Pillow

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import AlgoSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import all_gather_object, connect, expand_segments, read_world, trim_malloc
from megatron_rl.memory_plan.delta_net_memory import delta_net_products
from megatron_rl.memory_plan.gpu_specs import GPU_SPECS
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import is_expert_tensor
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout, check_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.types import Image, MicroBatch, SpecialTokens, TokenSequence

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense", "aten::nonzero")
"""Profiler names of operations that block the host; the last two block it only on a GPU."""


def pieces(model: ModelSpec, *, contexts: int, text: int, side: int, group: int = 1, unshared: bool = False) -> list[PackItem]:
    """Return sequences of random image patches and token ids; uses no tokenizer or processor."""
    vision, made = model.vision, []
    special = (model.image_token_id, model.video_token_id, model.vision_start_id, model.vision_end_id)
    plain = [token for token in range(min(model.vocab_size, 1000)) if token not in special]
    cells = side // vision.patch_size
    for index in range(contexts):
        if index % group == 0:
            generator = torch.Generator().manual_seed(index)
            patch_PC = torch.randn(cells * cells, vision.patch_dim, generator=generator)
            image = Image(Pillow.new("RGB", (1, 1)), patch_PC, (1, cells, cells), key=str(index), merge=vision.spatial_merge_size)
            asked = words(plain, text // 2, generator)
            shown = [model.vision_start_id, *[model.image_token_id] * image.num_tokens, model.vision_end_id]
        first = [plain[index % len(plain)]] if unshared else asked[:1]
        context = TokenSequence()
        context.extend([*first, *shown, *asked[1:]], images=(image,))
        context.extend(words(plain, text - text // 2, generator), logprobs=[-1.0] * (text - text // 2))
        context.set_column("advantages", [(-1.0) ** index] * len(context.token_ids))
        made.append(PackItem(context, denominator=text - text // 2))
    return made


def words(plain: list[int], num: int, generator: torch.Generator) -> list[int]:
    """Return `num` random token ids from `plain`."""
    return [plain[choice] for choice in torch.randint(len(plain), (num,), generator=generator).tolist()]


def count_parameters(weights: Iterable[tuple[str, torch.Tensor]], *, used_experts: float = 1.0) -> dict[str, float]:
    """Return the number of parameters that are factors of a token's matrix products, for each part.

    The embedding is a lookup; its size is counted once, as that of the output layer. Of the
    experts' parameters, the fraction `used_experts` is counted.
    """
    sizes: dict[str, float] = {"decoder": 0, "output": 0, "vision": 0}
    for name, tensor in weights:
        if name == "model.embed_tokens.weight":
            sizes["output"] = tensor.numel()
        elif name != "lm_head.weight":
            used = used_experts if is_expert_tensor(name) else 1
            sizes["vision" if name.startswith("visual.") else "decoder"] += used * tensor.numel()
    return sizes


def flops(parameters: dict[str, float], batches: list[MicroBatch], model: ModelSpec, *, has_adapters: bool) -> float:
    """Return the FLOPs of one update over these micro-batches, forward and backward."""
    of_language, of_vision = (4, 2) if has_adapters else (6, 6)
    tokens = sum(batch.num_tokens for batch in batches)
    sampled = sum(int(batch.mask_T.sum()) for batch in batches)
    patches = sum(image.num_patches for batch in batches for image in batch.images)
    attention = 12 * model.num_attention_layers * model.num_heads * model.head_dim * sum(map(squares, batches)) / 2
    attention += 6 * delta_net_products(model) * tokens
    language = parameters["decoder"] * tokens + parameters["output"] * sampled
    return of_language * language + of_vision * parameters["vision"] * patches + attention


def squares(batch: MicroBatch) -> int:
    """Return the sum of (prefix + segment length)^2 - (prefix length)^2 over all segments.

    Example: a prompt of 3 tokens with responses of 2 tokens and 1 token results in 9 + (25 - 9) +
    (16 - 9) = 32.
    """
    lengths = batch.cu_seqlens_S1.diff().tolist()
    before: list[int] = []
    for prefix in batch.prefix_S:
        before.append(before[prefix] + lengths[prefix] if prefix >= 0 else 0)
    return sum((first + own) ** 2 - first**2 for first, own in zip(before, lengths, strict=True))


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "vision", "full"])
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--text", type=int, default=1024, help="text tokens per sequence")
    parser.add_argument("--image", type=int, default=560, help="side of each sequence's image in pixels; a multiple of 28")
    parser.add_argument("--group", type=int, default=1, help="number of sequences that share prompt and image")
    parser.add_argument(
        "--unshared", action="store_true", help="start each prompt of a group with a different token, so the sequences share no tokens"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=5, help="number of timed updates, after one warm-up update")
    parser.add_argument("--profile", action="store_true", help="profile one more update with torch.profiler")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --profile: write a Chrome trace (.json.gz)")
    given = parser.parse_args()

    world, model = read_world(), read_spec(given.model, key="--model")
    parallel = ParallelSettings(tp=given.tp, pp=given.pp, sequence_parallel=given.sequence_parallel, recompute=given.recompute)
    check_layout(parallel, model, world.size)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as megatron_rl/cli does
    trim_malloc()
    if world.device.type == "cuda":
        expand_segments()
    connect(world, timeout_s=1800)
    settings = ModelSettings(path=str(given.model), dtype=given.dtype)
    policy = Policy(
        settings, build_layout(parallel, seed=0),
        training=TrainingSettings(
            parallel=parallel, optim=OptimSettings(lr=1e-6), num_steps=given.updates + 1, lora=LoraSettings(rank=given.lora_rank)
        ),
        special_tokens=SpecialTokens(image_token_id=model.image_token_id, banned_ids=[model.image_token_id, model.video_token_id]),
    )  # fmt: skip
    experts = policy.spec.experts
    sizes = count_parameters(policy.hf_weights(), used_experts=experts.top_k / experts.num_experts if experts else 1.0)
    work = pieces(model, contexts=given.sequences, text=given.text, side=given.image, group=given.group, unshared=given.unshared)

    def update() -> list[MicroBatch]:
        batches = policy.pack(work, max_tokens=given.micro_batch_tokens)
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)
        return batches

    seconds = []
    for _ in range(given.updates + 1):
        start = time.perf_counter()
        batches = update()
        seconds.append(time.perf_counter() - start)
    computed = sum(all_gather_object(flops(sizes, batches, model, has_adapters=given.lora_rank > 0))) / (given.tp * given.pp)
    if world.is_main:
        report(min(seconds[1:]), sum(piece.num_tokens for piece in work), computed, world.size)
    if given.profile:
        print_profile(update, given.trace)
    dist.destroy_process_group()


def print_profile(act: Callable[[], object], trace: Path | None) -> None:
    """Print the 30 slowest kernels (on a CPU, operators) and how often the host waited.

    Writes a Chrome trace to `trace`, if given.
    """
    has_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * has_gpu], record_shapes=trace is not None) as seen:
        act()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    averages = seen.key_averages()
    by = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    print(averages.table(sort_by=by, row_limit=30, max_name_column_width=60))
    waits = {row.key: row.count for row in averages if row.key in WAITS}
    print(f"host synchronizations in one update: {waits}")


def report(seconds: float, tokens: int, work: float, processes: int) -> None:
    """Print the table."""
    rate = work / seconds / processes
    if torch.cuda.is_available():
        device, memory = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() / 2**30
    else:
        device, memory = "CPU", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = next((gpu.flops_per_s for name, gpu in GPU_SPECS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE)), None)
    share = f"{rate / peak:.1%}" if peak else "unknown device"
    print("| device | processes | s / update | tokens / s | TFLOP/s per process | MFU | peak GiB |\n|---|---|---|---|---|---|---|")
    print(f"| {device} | {processes} | {seconds:.3f} | {tokens / seconds:.0f} | {rate / 1e12:.3f} | {share} | {memory:.2f} |")


if __name__ == "__main__":
    main()
