"""Builds this rank's part of a model and loads its weights, including adapters."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import LoraSettings
from megatron_rl.dtypes import torch_dtype
from megatron_rl.models.adapter_mapping import adapter_table
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import ParamMapping
from megatron_rl.policy.lora import check_adapter_targets
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.transformer import HeadConfig, ModelChunks, build_chunks, has_fused_layers
from megatron_rl.weights.formats.base_digest import check_base
from megatron_rl.weights.formats.checkpoint_source import describe_skipped
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import init_adapters, load_peft, read_peft_config
from megatron_rl.weights.stream import ShardLocation, is_of_output_layer, load_hf


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadedModel:
    """Model chunks of this rank, with mappings between Megatron and Hugging Face names."""

    chunks: ModelChunks
    rows: list[ParamMapping]
    """Name mappings of the base model, used to load and to export its weights."""
    adapter_rows: list[ParamMapping]
    """Name mappings of the adapters; empty without adapters."""
    placement: ShardLocation
    """Position of this rank's chunks in the parallel layout."""


@with_megatron_on_cpu
def load_model(
    spec: ModelSpec, layout: Layout, path: str, *, dtype: str, lora: LoraSettings, heads: HeadConfig, seed: int, key: str = "model.path"
) -> LoadedModel:
    """Build this rank's chunks and load the weights of the checkpoint at `path`.

    Adapters are loaded from lora.path; if lora.path is empty, new adapters are initialized. `seed`
    is used to initialize new adapters and the value head. `key` is the config key that contains
    `path`, used in error messages.
    """
    check_adapter_targets(lora, spec, key="lora.targets")
    chunks = build_chunks(spec, layout, torch_dtype(dtype), lora=lora, heads=heads)
    if torch.cuda.is_available():  # use_cpu_initialization creates parameters on the CPU
        chunks.cuda()
    rows = [row for row in spec.param_mappings() if heads.has_lm_head or not is_of_output_layer(row)]
    placement = ShardLocation(
        layout.tp_rank, layout.tp_group, layout.pp_rank, layout.pp_group, chunks=layout.vpp,
        layers_per_chunk=spec.num_layers // (layout.pp * layout.vpp), fused_norms=has_fused_layers(spec, lora),
        ep_rank=layout.ep_rank, ep=layout.ep, tp_ep_group=layout.tp_ep_group,
    )  # fmt: skip
    source = open_source(Path(path), spec, key=key)
    if source.skipped and dist.get_rank() == 0:
        print(f"{key}={path}: {describe_skipped(source)}", flush=True)
    load_hf(chunks, rows, placement, source.read)
    targets = lora.targets if lora.rank else []
    vision_names = [row.mcore_name.removeprefix("vision.") for row in rows if row.mcore_name.startswith("vision.")]
    adapter_rows = adapter_table(spec, targets=targets, vision_names=vision_names)
    if lora.path:
        warning = check_base(read_peft_config(Path(lora.path), key="lora.path"), source, key="lora.path", adapter=lora.path)
        if warning and dist.get_rank() == 0:
            print(f"warning: {warning}", flush=True)
        load_peft(chunks, adapter_rows, placement, Path(lora.path), rank=lora.rank, alpha=lora.alpha)
    else:
        init_adapters(chunks, adapter_rows, placement, seed=seed)
    head = chunks[-1].value_head
    if head is not None:
        head.reset_parameters(seed)
    return LoadedModel(chunks=chunks, rows=rows, adapter_rows=adapter_rows, placement=placement)
