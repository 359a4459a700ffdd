"""LoRA adapters on the experts of a layer, as PEFT has them for a parameter that stacks experts.

PEFT (0.21, tuners/lora/layer.py, ParamWrapper) adds alpha / rank * B_e A_e to the matrix of expert
e. Here the product with each token is computed by two grouped matrix products of low rank, on the
same tokens in the same order as the product with the experts.

Under expert parallelism, a rank has the adapters of its experts. Tensor parallelism shards the
intermediate size F: B of linear_fc1 and A of linear_fc2. All ranks compute with whole copies of the
other two matrices, and Megatron sums the gradients of the copies after the backward pass. No
further exchange is needed: A of linear_fc2 gives partial sums, B is linear, and the dispatcher adds
up the ranks' outputs.
"""

from typing import cast

import torch
from torch import nn
from torch.nn.functional import grouped_mm

from megatron_rl.config import LoraSettings
from megatron_rl.weights.formats.merge_lora import add_to_experts
from megatron_rl.weights.stream import MegatronParameter


class ExpertAdapter(nn.Module):
    """Adapters of one matrix of this rank's experts, of rank R.

    For a weight [E, I, ...] of E experts with I inputs, A is [E, R, I], and B is [E, R, ...]. The
    parameters are not initialized.
    """

    def __init__(self, lora: LoraSettings, weight: torch.Tensor) -> None:
        super().__init__()
        num_experts, num_inputs, *outputs = weight.shape
        self.scale, self.enabled = lora.alpha / lora.rank, True
        self.lora_a = nn.Parameter(weight.new_empty(num_experts, lora.rank, num_inputs))
        self.lora_b = nn.Parameter(weight.new_empty(num_experts, lora.rank, *outputs))

    def forward(self, output_MO: torch.Tensor, x_MI: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
        """Add the adapters' output to that of the experts, if adapters are enabled.

        Args:
            output_MO: Output of the experts, grouped by expert.
            x_MI: Their inputs, in the same order.
            end_E: For each expert, the row after its last one.
        """
        if not self.enabled:
            return output_MO
        low_MR = grouped_mm(x_MI, self.lora_a.transpose(1, 2), offs=end_E)
        return output_MO + grouped_mm(self.scale * low_MR, self.lora_b.flatten(2), offs=end_E)

    @torch.no_grad()
    def merge_into(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the experts with the adapters merged in, as a new tensor.

        Disabled adapters are not merged.
        """
        if not self.enabled:
            return weight.clone()
        merged = add_to_experts(weight.flatten(2), self.lora_a, self.lora_b.flatten(2), scale=self.scale)
        return merged.view_as(weight)


def build_expert_adapters(lora: LoraSettings, weights: dict[str, nn.Parameter], *, tp: int) -> nn.ModuleDict:
    """Return the adapters of a layer's experts by name of the weight; none if not selected.

    `tp` is the number of ranks that shard the experts.
    """
    if not lora.rank or "mlp" not in lora.targets:
        return nn.ModuleDict()
    adapters = {name: ExpertAdapter(lora, weight) for name, weight in weights.items()}
    for replicated in (adapters["linear_fc1"].lora_a, adapters["linear_fc2"].lora_b):
        cast("MegatronParameter", replicated).sequence_parallel = tp > 1  # Megatron sums the ranks' gradients
    return nn.ModuleDict(adapters)
