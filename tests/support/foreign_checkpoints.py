"""Writes checkpoints in the formats of other trainers.

The tensors are sliced here row by row or by torch, so that the mapping tables under test are not
involved.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.models.name_mapping import canonical_name

State = dict[str, torch.Tensor]
HEADS, KV_HEADS, HEAD_DIM, LAYERS, VISION_HEADS, VISION_DIM = 4, 2, 32, 4, 2, 32
"""Sizes of the nano checkpoint."""
BLOCK_MLP = {
    "qwen2_5_vl": (("gate_proj", "up_proj"), "down_proj"), "qwen2_vl": (("fc1",), "fc2"), "qwen3_vl": (("linear_fc1",), "linear_fc2"),
}  # fmt: skip
"""Layer names of a vision block's MLP per model family."""


def read_hf_tensors(folder: Path) -> State:
    """Return all tensors of a Hugging Face folder, keyed by their released names, read with
    safetensors alone.
    """
    return {canonical_name(name): tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def head_rows(tensor: torch.Tensor, head: int, dim: int) -> torch.Tensor:
    return tensor[head * dim : (head + 1) * dim]


def tensor_shard(tensor: torch.Tensor, rank: int, tp: int, dim: int) -> torch.Tensor:
    size = tensor.shape[dim] // tp
    return tensor.narrow(dim, rank * size, size).clone()


def layer_shard(hf: State, layer: int, rank: int, tp: int, *, fused_norms: bool) -> State:
    """Return one decoder layer of one tensor-parallel rank, with Megatron's names without their
    prefix.
    """
    prefix = f"model.layers.{layer}."
    state = {
        "self_attention.linear_proj.weight": tensor_shard(hf[f"{prefix}self_attn.o_proj.weight"], rank, tp, 1),
        "mlp.linear_fc2.weight": tensor_shard(hf[f"{prefix}mlp.down_proj.weight"], rank, tp, 1),
        "mlp.linear_fc1.weight": torch.cat([tensor_shard(hf[f"{prefix}mlp.{half}_proj.weight"], rank, tp, 0) for half in ("gate", "up")]),
    }
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    norms = norms if fused_norms else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    state |= {norms[0]: hf[f"{prefix}input_layernorm.weight"], norms[1]: hf[f"{prefix}post_attention_layernorm.weight"]}
    norms = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    state |= {
        f"self_attention.{mine}.weight": hf[f"{prefix}self_attn.{theirs}.weight"]
        for mine, theirs in norms.items() if f"{prefix}self_attn.{theirs}.weight" in hf
    }  # fmt: skip
    for kind in [kind for kind in ("weight", "bias") if f"{prefix}self_attn.q_proj.{kind}" in hf]:
        q, k, v = (hf[f"{prefix}self_attn.{each}_proj.{kind}"] for each in "qkv")
        blocks = []
        for group in range(rank * KV_HEADS // tp, (rank + 1) * KV_HEADS // tp):
            per_group = HEADS // KV_HEADS
            blocks += [head_rows(q, head, HEAD_DIM) for head in range(group * per_group, (group + 1) * per_group)]
            blocks += [head_rows(k, group, HEAD_DIM), head_rows(v, group, HEAD_DIM)]
        state[f"self_attention.linear_qkv.{kind}"] = torch.cat(blocks)
    return state


def detect_family(hf: State) -> str:
    return next(family for family, (first, _) in BLOCK_MLP.items() if f"visual.blocks.0.mlp.{first[0]}.weight" in hf)


def mlp_shard(hf: State, name: str, first: tuple[str, ...], second: str, rank: int, tp: int) -> State:
    """Return the MLP shard of one rank.

    If the first layer has two halves, each is sharded and they are concatenated.
    """
    state = {}
    for kind in ("weight", "bias"):
        state[f"linear_fc1.{kind}"] = torch.cat([tensor_shard(hf[f"{name}.{each}.{kind}"], rank, tp, 0) for each in first])
    state["linear_fc2.weight"] = tensor_shard(hf[f"{name}.{second}.weight"], rank, tp, 1)
    return state | {"linear_fc2.bias": hf[f"{name}.{second}.bias"]}


def merger_state(hf: State, rank: int, tp: int) -> State:
    """Return the merger: as Megatron's projector, with its norm as the final norm of the decoder,
    or as mbridge's own mergers for Qwen3-VL.
    """
    state = {}
    for kind in [kind for kind in ("weight", "bias") if f"visual.merger.ln_q.{kind}" in hf]:
        state[f"decoder.final_layernorm.{kind}"] = hf[f"visual.merger.ln_q.{kind}"]
    if "visual.merger.mlp.0.weight" in hf:
        mlp = mlp_shard(hf, "visual.merger.mlp", ("0",), "2", rank, tp)
        return state | {f"projection.encoder.{name}": tensor for name, tensor in mlp.items()}
    for name in ("merger", "deepstack_merger_list.0", "deepstack_merger_list.1", "deepstack_merger_list.2"):
        mine = name if name == "merger" else f"decoder.{name}"
        state |= {f"{mine}.patch_norm.{kind}": hf[f"visual.{name}.norm.{kind}"] for kind in ("weight", "bias")}
        mlp = mlp_shard(hf, f"visual.{name}", ("linear_fc1",), "linear_fc2", rank, tp)
        state |= {f"{mine}.{each}": tensor for each, tensor in mlp.items()}
    return state


def megatron_tower_state(hf: State, rank: int, tp: int) -> State:
    """Return the vision tower of one rank as Megatron shards it."""
    whole = ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
    state = {name: hf[f"visual.{name}"] for name in whole if f"visual.{name}" in hf} | merger_state(hf, rank, tp)
    for block in range(sum(name.endswith(".attn.qkv.weight") for name in hf)):
        mcore, prefix = f"decoder.layers.{block}.", f"visual.blocks.{block}."
        for kind in [kind for kind in ("weight", "bias") if f"{prefix}norm1.{kind}" in hf]:
            state[f"{mcore}self_attention.linear_qkv.layer_norm_{kind}"] = hf[f"{prefix}norm1.{kind}"]
            state[f"{mcore}mlp.linear_fc1.layer_norm_{kind}"] = hf[f"{prefix}norm2.{kind}"]
        mlp = mlp_shard(hf, f"{prefix}mlp", *BLOCK_MLP[detect_family(hf)], rank, tp)
        state |= {f"{mcore}mlp.{name}": tensor for name, tensor in mlp.items()}
        state[f"{mcore}self_attention.linear_proj.weight"] = tensor_shard(hf[f"{prefix}attn.proj.weight"], rank, tp, 1)
        state[f"{mcore}self_attention.linear_proj.bias"] = hf[f"{prefix}attn.proj.bias"]
        for kind in ("weight", "bias"):
            fused, width = hf[f"{prefix}attn.qkv.{kind}"], VISION_HEADS * VISION_DIM
            heads = range(rank * VISION_HEADS // tp, (rank + 1) * VISION_HEADS // tp)
            blocks = [head_rows(fused[part * width :], head, VISION_DIM) for head in heads for part in range(3)]
            state[f"{mcore}self_attention.linear_qkv.{kind}"] = torch.cat(blocks)
    return state


def chunk_state(hf: State, layers: range, rank: int, tp: int, *, padding: int, tower: str, fused_norms: bool, is_tied_copy: bool) -> State:
    """Return one model chunk of one rank.

    Its layers are numbered from 0; embedding, final norm and output layer belong to the first and
    last chunk.
    """

    def padded(name: str) -> torch.Tensor:
        return tensor_shard(torch.cat([hf[name], torch.full((padding, hf[name].shape[1]), 7.0)]), rank, tp, 0)

    state: State = {}
    if layers.start == 0:
        vision = (
            megatron_tower_state(hf, rank, tp)
            if tower == "megatron"
            else {n.removeprefix("visual."): t for n, t in hf.items() if n.startswith("visual.")}
        )
        state |= {f"vision_model.{name}": tensor for name, tensor in vision.items()}
        state["language_model.embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    for number, layer in enumerate(layers):
        part = layer_shard(hf, layer, rank, tp, fused_norms=fused_norms)
        state |= {f"language_model.decoder.layers.{number}.{name}": tensor for name, tensor in part.items()}
    if layers.stop == LAYERS:
        state["language_model.decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if "lm_head.weight" in hf or is_tied_copy:
            state["language_model.output_layer.weight"] = padded(
                "lm_head.weight" if "lm_head.weight" in hf else "model.embed_tokens.weight"
            )
    return state


def write_verl_megatron(
    out: Path, hf: State, *, tp: int, pp: int, chunks: int = 1, padding: int = 0, tower: str = "hf", tied: bool = False
) -> None:
    """Write a checkpoint of verl: out/model/mp_rank_TT_PPP/model.pt with a list of state dicts.

    Norms are fused as in Transformer Engine.
    """
    size = LAYERS // (pp * chunks)
    for rank in range(tp):
        for stage in range(pp):
            firsts = [(chunk * pp + stage) * size for chunk in range(chunks)]
            states = [
                chunk_state(
                    hf, range(first, first + size), rank, tp, padding=padding, tower=tower, fused_norms=True, is_tied_copy=tied and pp > 1
                ) | {"language_model.decoder.layers.0.mlp.linear_fc1._extra_state": None}
                for first in firsts
            ]  # fmt: skip
            path = out / "model" / f"mp_rank_{rank:02d}_{stage:03d}" / "model.pt"
            path.parent.mkdir(parents=True)
            torch.save(states, path)


def write_megatron_lm(out: Path, hf: State, *, tp: int, change: Callable[[int, State], None] | None = None) -> None:
    """Write a checkpoint of Megatron-LM with one pipeline stage: out/mp_rank_TT/model_optim_rng.pt.
    The state dict is stored under "model", next to arguments and random states.

    `change(rank, state)` may damage a rank's state dict.
    """
    for rank in range(tp):
        state = chunk_state(hf, range(LAYERS), rank, tp, padding=0, tower="hf", fused_norms=False, is_tied_copy=False)
        state = {f"module.{name.removeprefix('language_model.')}": tensor for name, tensor in state.items()}
        if change is not None:
            change(rank, state)
        path = out / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        everything = {
            "args": argparse.Namespace(tensor_model_parallel_size=tp, params_dtype=torch.bfloat16), "iteration": 100,
            "model": state, "rng_state": [{"np_rng_state": np.random.default_rng(0).bit_generator.state, "array": np.arange(3)}],
        }  # fmt: skip
        torch.save(everything, path)


def write_fsdp(out: Path, hf: State, mesh_shape: tuple[int, ...]) -> None:
    """Write what each rank of an FSDP world saves: one file per rank with DTensors, sharded by
    torch itself in a fake process group.
    """
    out.mkdir()
    size = torch.Size(mesh_shape).numel()
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ddp", "fsdp")[-len(mesh_shape) :])
            state = {name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in hf.items()}
            torch.save(state, out / f"model_world_size_{size}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
