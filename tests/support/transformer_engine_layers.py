"""Compares a policy with Transformer Engine's layer spec, built by Megatron on the fake Transformer
Engine, with a policy with this trainer's own layers. Prints JSON.

Without a model folder as its argument, the script uses the installed Transformer Engine instead of
the fake one and prints only what the trainer reports about it.
"""

import json
import sys
from pathlib import Path

from tests.support import fake_transformer_engine

if len(sys.argv) > 1:
    fake_transformer_engine.install_fake()

import torch

from megatron_rl.batching.packing import pack
from megatron_rl.config import LoraSettings, OptimSettings
from megatron_rl.policy import kernels, policy, transformer
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import compute_gradients, full_logits
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


def compare_layers(model: Path) -> dict[str, object]:
    """Return the largest difference of logits and of gradients (relative to the tensor's maximum),
    and the names and shapes of the parameters.
    """
    results = []
    for uses in (True, False):
        for module in (policy, transformer):
            module.uses_transformer_engine = lambda lora, uses=uses: uses
        made, renderer = make_policy_and_renderer(model, OptimSettings())
        batch = pack(make_example_items(renderer), image_token_id=renderer.image_token_id, positions=made.spec.rope_positions)
        named = {name: list(parameter.shape) for name, parameter in made.network.chunks[0].named_parameters()}
        modules = {name: type(module).__name__ for name, module in made.network.chunks[0].named_modules()}
        results.append((full_logits(made, batch), compute_gradients(made, [batch]), dict(made.hf_weights()), named, modules))
    theirs, ours = results
    return {
        "logits": float((theirs[0] - ours[0]).abs().max()),
        "gradients": max(float((theirs[1][name] - ours[1][name]).abs().max() / ours[1][name].abs().max()) for name in ours[1]),
        "same_names": theirs[1].keys() == ours[1].keys(),
        "same_export": all(torch.equal(theirs[2][name], ours[2][name]) for name in ours[2]) and theirs[2].keys() == ours[2].keys(),
        "parameters": theirs[3],
        "our_parameters": ours[3],
        "modules": theirs[4],
    }


def describe_kernels(capability: tuple[int, int]) -> dict[str, object]:
    """Return what the trainer reports about its kernels on a GPU with this compute capability."""
    torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: capability
    uses = [kernels.uses_transformer_engine(LoraSettings(rank=rank)) for rank in (0, 4)]
    return {"trouble": kernels.transformer_engine_error(), "uses": uses, "kernels": kernels.describe_kernels(LoraSettings())}


def main() -> None:
    found = {}
    if len(sys.argv) > 1:
        with single_process_world():
            found = compare_layers(Path(sys.argv[1]))
    print(json.dumps(found | {"hopper": describe_kernels((9, 0)), "ada": describe_kernels((8, 9))}))


if __name__ == "__main__":
    main()
