"""Merges a LoRA adapter in PEFT's format into a base model.

A merged weight is W + scale * B @ A, computed in fp32. Tensors are merged one at a time. PEFT's
format consists of adapter_config.json and adapter_model.safetensors. For each adapted module,
adapter_model.safetensors contains `base_model.model.<module>.lora_A.weight` [rank, in] and
`.lora_B.weight` [out, rank]. The scale is alpha / rank, or alpha / sqrt(rank) with use_rslora (peft
0.21, tuners/lora/layer.py). Adapters on experts have another form (models/adapter_mapping.py).
"""

import math
from pathlib import Path

import torch

from megatron_rl.models.adapter_mapping import adapted_tensor, stack_a, stack_b
from megatron_rl.models.name_mapping import is_expert_tensor
from megatron_rl.weights.formats.base_digest import check_base
from megatron_rl.weights.formats.checkpoint_source import TensorSource
from megatron_rl.weights.formats.peft import read_peft_config
from megatron_rl.weights.formats.safetensors_folder import HfTensors

HALVES = (".lora_A.weight", ".lora_B.weight")


def add_to_experts(weight_EIO: torch.Tensor, a_ERI: torch.Tensor, b_ERO: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the experts' weights with their adapters merged in, as a new tensor.

    A run and the merger both call this function, so their weights are equal bit for bit if the
    shapes are. The sum is computed in fp32.
    """
    a_EIR, b_ERO = a_ERI.float().contiguous().transpose(1, 2), b_ERO.float().contiguous()
    return torch.baddbmm(weight_EIO.float(), a_EIR, b_ERO, alpha=scale).to(weight_EIO.dtype)


class MergedTensors:
    """Source of a base model's tensors with an adapter merged in.

    Raises ValueError if an adapter tensor does not belong to a tensor of the base model. `key` is
    the setting or option that names the adapter, used in error messages.
    """

    def __init__(self, base: TensorSource, adapter: Path, *, key: str) -> None:
        self.base, self.specs, self.skipped = base, base.specs, base.skipped
        config = read_peft_config(adapter, key=key)
        self.rank, self.scale = config["r"], config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
        self.adapter = HfTensors(adapter, key=key)
        halves: dict[str, dict[str, str]] = {}
        for name in sorted(self.adapter.specs):
            end = next((end for end in HALVES if name.endswith(end)), "")
            target = adapted_tensor(name.removesuffix(end))
            if not end or target not in self.specs:
                raise ValueError(
                    f"{key}={adapter}: {self.adapter.stored_name(name)} is not in the base model; use the adapter's own base model"
                )
            halves.setdefault(target, {})[end] = name
        self.pairs = {target: self._pair(target, names) for target, names in halves.items()}
        self.warning = check_base(config, base, key=key, adapter=adapter)
        """Warning for an adapter without a digest of its base model; '' if it has a digest."""

    def _pair(self, target: str, names: dict[str, str]) -> tuple[str, str]:
        """Return the names of a base-model tensor's A and B tensors, and check their shapes.

        `names` contains the names of those that exist, keyed by their ends (HALVES).
        """
        missing = next((end for end in HALVES if end not in names), None)
        if missing is not None:
            (known,) = names.items()
            raise ValueError(
                f"{self.adapter.key}={self.adapter.folder}: {known[1].removesuffix(known[0])}{missing} is missing, "
                f"but the adapter contains the other matrix for {target}"
            )
        a, b = (names[end] for end in HALVES)
        outputs, *inputs = self.specs[target].shape
        rank = self.rank
        if is_expert_tensor(target):
            num_experts, *matrix = self.specs[target].shape
            outputs, inputs = reversed(matrix) if self._has_inputs_first(target) else matrix
            rank, inputs = rank * num_experts, [inputs]
        sizes = [list(self.adapter.specs[name].shape) for name in (a, b)]
        if sizes != [[rank, *inputs], [outputs, rank]]:
            raise ValueError(
                f"{self.adapter.key}={self.adapter.folder}: {a} of shape {sizes[0]} and {b} of shape {sizes[1]}, with r={self.rank}, "
                f"do not fit the base tensor {target} ({self.specs[target]})"
            )
        return a, b

    def _has_inputs_first(self, target: str) -> bool:
        """Return True if experts are stored as [experts, inputs, outputs], not outputs first."""
        stem = target.rpartition(".")[0]
        return self.specs[f"{stem}.gate_up_proj"].shape[-2] == self.specs[f"{stem}.down_proj"].shape[-1]

    def read(self, name: str) -> torch.Tensor:
        """Return the base model's tensor `name` with the adapter merged in."""
        weight = self.base.read(name)
        if name not in self.pairs:
            return weight
        a, b = (self.adapter.read(half).float() for half in self.pairs[name])
        if is_expert_tensor(name):
            halves = stack_a(a, len(weight)), stack_b(b, len(weight))
            if self._has_inputs_first(name):
                return add_to_experts(weight, *halves, scale=self.scale)
            return add_to_experts(weight.transpose(1, 2).contiguous(), *halves, scale=self.scale).transpose(1, 2).contiguous()
        return torch.addmm(weight.float(), b, a, alpha=self.scale).to(weight.dtype)
