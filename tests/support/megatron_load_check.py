"""Compares, in each layout and bit for bit, Megatron's own load of a converted checkpoint with the
policy's load of the Hugging Face folder it was made from. Run under torchrun by test_converted.py.

    megatron_load_check.py TP,PP ... -- FOLDER ...

Each folder contains model/ and checkpoint/.
"""

import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch import nn

from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.transformer import ModelChunk
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.stream import ShardLocation, load_hf


def check_load(model: Path, checkpoint: Path, tp: int, pp: int) -> None:
    spec = read_spec(model)
    with megatron_on_cpu():
        layout = build_layout(ParallelSettings(tp=tp, pp=pp), seed=0)
        ours, theirs = (ModelChunk(spec, layout, torch.float32, lora=LoraSettings()) for _ in range(2))
        placement = ShardLocation(
            layout.tp_rank, layout.tp_group, layout.pp_rank, layout.pp_group, chunks=1, layers_per_chunk=spec.num_layers // pp
        )
        load_hf(nn.ModuleList([ours]), spec.param_mappings(), placement, HfTensors(model).read)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.fill_(float("nan"))
        wanted = theirs.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        loaded, missing, unexpected = dist_checkpointing.load(wanted, str(checkpoint), strict="return_all")
        theirs.load_state_dict(loaded)
        parallel_state.destroy_model_parallel()
    assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"
    parameters = dict(theirs.named_parameters())
    wrong = [name for name, parameter in ours.named_parameters() if not torch.equal(parameter, parameters.pop(name))]
    assert not wrong and not parameters, f"tp{tp} pp{pp}: {wrong} {sorted(parameters)}"


def main() -> None:
    connect(read_world(), timeout_s=120)
    cut = sys.argv.index("--")
    for folder in map(Path, sys.argv[cut + 1 :]):
        for layout in sys.argv[1:cut]:
            tp, pp = (int(part) for part in layout.split(","))
            check_load(folder / "model", folder / "checkpoint", tp, pp)
            sys.stdout.write(f"[{folder.name}] equal at tp{tp} pp{pp}\n")  # one write, because four processes print


if __name__ == "__main__":
    main()
