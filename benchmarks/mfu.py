"""Training speed of the policy at real shapes: seconds an update, tokens a second, FLOP/s, their share of the device's peak, peak memory.

    .venv/bin/python tools/data/make_shapes.py --size 7B --out runs/shapes/7B         # random weights, 16.6 GB
    torchrun --nproc_per_node 1 benchmarks/mfu.py --model runs/shapes/7B --dtype bfloat16 --recompute full
    .venv/bin/python benchmarks/mfu.py --model runs/quickstart/nano --sequences 8 --text 100 --image 140     # tries the script itself

Every sequence has one picture of its own and random text, half of it sampled. FLOPs: 6 for each parameter and token (the tower's patches
and the language model's tokens apart), attention's 12 * layers * heads * head_dim * length^2 / 2 for the language model, nothing for
recomputation.
"""

import argparse
import re
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image as Pillow

from megatron_rl.algo.objective import objective
from megatron_rl.config import AlgoSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.minibatches import WeightedContext
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.devices import GPUS
from megatron_rl.policy.parallel import build_layout, check_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.types import Context, Image
from megatron_rl.world import connect, place


def pieces(model: ModelSpec, *, contexts: int, text: int, side: int) -> list[WeightedContext]:
    """Random patches and token ids: no tokenizer and no processor is needed."""
    vision, made = model.vision, []
    special = (model.image_token_id, model.video_token_id, model.vision_start_id, model.vision_end_id)
    plain = [token for token in range(min(model.vocab_size, 1000)) if token not in special]
    cells = side // vision.patch
    for index in range(contexts):
        generator = torch.Generator().manual_seed(index)
        words = [plain[choice] for choice in torch.randint(len(plain), (text,), generator=generator).tolist()]
        patch_PC = torch.randn(cells * cells, vision.patch_numbers, generator=generator)
        image = Image(Pillow.new("RGB", (1, 1)), patch_PC, (1, cells, cells), key=str(index), merge=vision.merge)
        prompt = [model.vision_start_id, *[model.image_token_id] * image.num_tokens, model.vision_end_id, *words[: text // 2]]
        context = Context()
        context.extend(prompt, images=(image,))
        context.extend(words[text // 2 :], logprobs=[-1.0] * (text - text // 2))
        context.attach("advantages", [(-1.0) ** index] * len(context.token_ids))
        made.append(WeightedContext(context, denominator=text - text // 2))
    return made


def flops(policy_parameters: dict[str, int], work: list[WeightedContext], model: ModelSpec) -> float:
    """Of one update over all pieces, forward and backward."""
    lengths = [piece.num_tokens for piece in work]
    patches = sum(image.patch_PC.shape[0] for piece in work for image in piece.context.images)
    attention = sum(12 * model.num_layers * model.num_heads * model.head_dim * length**2 / 2 for length in lengths)
    return 6 * policy_parameters["language"] * sum(lengths) + 6 * policy_parameters["vision"] * patches + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "vision", "full"])
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--text", type=int, default=1024, help="text tokens a sequence")
    parser.add_argument("--image", type=int, default=560, help="side of each sequence's picture, in pixels; a multiple of 28")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=5, help="timed ones, after one that is not")
    given = parser.parse_args()

    world, model = place(), read_spec(given.model, key="--model")
    parallel = ParallelSettings(tp=given.tp, pp=given.pp, sequence_parallel=given.sequence_parallel, recompute=given.recompute)
    check_layout(parallel, model, world.size)
    connect(world, timeout_s=1800)
    settings = ModelSettings(path=str(given.model), dtype=given.dtype)
    policy = Policy(
        settings, build_layout(parallel, seed=0), parallel=parallel, optim=OptimSettings(lr=1e-6), num_steps=given.updates + 1,
        lora=LoraSettings(rank=given.lora_rank), image_token_id=model.image_token_id,
        banned_ids=[model.image_token_id, model.video_token_id],
    )  # fmt: skip
    sizes = {"language": 0, "vision": 0}
    for name, tensor in policy.hf_weights():
        if name != "model.embed_tokens.weight" or model.tied:  # looked up, not multiplied
            sizes["vision" if name.startswith("visual.") else "language"] += tensor.numel()
    work = pieces(model, contexts=given.sequences, text=given.text, side=given.image)
    seconds = []
    for _ in range(given.updates + 1):
        start = time.perf_counter()
        policy.update(policy.pack(work, max_tokens=given.micro_batch_tokens), objective(AlgoSettings()), step=0)
        seconds.append(time.perf_counter() - start)
    if world.is_main:
        report(min(seconds[1:]), sum(piece.num_tokens for piece in work), flops(sizes, work, model), world.size)
    dist.destroy_process_group()


def report(seconds: float, tokens: int, work: float, processes: int) -> None:
    rate = work / seconds / processes
    if torch.cuda.is_available():
        device, memory = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() / 2**30
    else:
        device, memory = "CPU", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = next((gpu.flops for name, gpu in GPUS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE)), None)
    share = f"{rate / peak:.1%}" if peak else "device unknown"
    print("| device | processes | s / update | tokens / s | TFLOP/s a process | MFU | peak GiB |\n|---|---|---|---|---|---|---|")
    print(f"| {device} | {processes} | {seconds:.3f} | {tokens / seconds:.0f} | {rate / 1e12:.3f} | {share} | {memory:.2f} |")


if __name__ == "__main__":
    main()
