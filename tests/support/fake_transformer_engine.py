"""A Transformer Engine in plain torch, with the names, parameters and keywords of the real one that
megatron-core 0.16.1 uses.

It contains only what this trainer's policy needs. Everything else is missing, which Megatron takes
for an older version. tests/contracts/test_transformer_engine.py compares it with the source of the
real one if that is available. Install it before Megatron is imported.
"""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional

VERSION = "2.20.2"


class Linear(nn.Module):
    """Linear layer. Column parallelism shards out_features, row parallelism in_features."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
        tp_group: object = None, tp_size: int = 1, get_rng_state_tracker: object = None, init_method: object = None, bias: bool = True,
        return_bias: bool = False, parallel_mode: str | None = None, params_dtype: torch.dtype | None = None, device: str = "cuda",
        rng_tracker_name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, dtype=params_dtype, device=device))
        self.use_bias, self.in_features, self.out_features, self.parallel_mode = bias, in_features, out_features, parallel_mode

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return functional.linear(inp, self.weight, self.bias if self.use_bias else None)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, normalization: str = "LayerNorm", zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False, params_dtype: torch.dtype | None = None, device: str = "cuda", **linear: object,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **linear)
        assert normalization == "RMSNorm" and not zero_centered_gamma
        self.layer_norm_weight, self.eps = nn.Parameter(torch.empty(in_features, dtype=params_dtype, device=device)), eps

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return super().forward(functional.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps))


class RMSNorm(nn.Module):
    def __init__(
        self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False, device: str = "cuda",
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype, device=device)), eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None, attention_dropout: float = 0.0,
        attn_mask_type: str = "causal", sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: object = None,
        tp_group: object = None, layer_number: int | None = None, attention_type: str = "self", softmax_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = softmax_scale or kv_channels**-0.5

    def forward(
        self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor, attention_mask: None = None,
        qkv_format: str | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None, cu_seqlens_kv_padded: torch.Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend within each sequence: query [T, heads, d], key and value [T, groups, d] -> [T,
        heads * d].
        """
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and torch.equal(cu_seqlens_q, cu_seqlens_q_padded)
        outputs = []
        for start, stop in pairwise(cu_seqlens_q.tolist()):
            qkv = (x[start:stop].transpose(0, 1)[None] for x in (query_layer, key_layer, value_layer))
            attended = functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class Placeholder:
    """Stands in for objects that Megatron imports from the real package without using them."""


LAYERS = (Linear, LayerNormLinear, RMSNorm, DotProductAttention)
CONTENT = {
    "": {"__version__": VERSION},
    ".common": {},
    ".common.recipe": {"DelayedScaling": Placeholder},
    ".pytorch": {**{layer.__name__: layer for layer in LAYERS}, "GroupedLinear": Placeholder},
    ".pytorch.distributed": {"CudaRNGStatesTracker": Placeholder, "activation_recompute_forward": Placeholder},
    ".pytorch.fp8": {"FP8GlobalStateManager": Placeholder, "fp8_autocast": Placeholder},
    ".pytorch.tensor": {"QuantizedTensor": Placeholder},
    ".pytorch.ops": {"Sequential": Placeholder, "FusibleOperation": Placeholder},
    ".pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"), Placeholder
    ),
}
"""Submodules with the objects that Megatron imports from them unconditionally
(extensions/transformer_engine.py).
"""


def install_fake(*, has_fp8: bool = True) -> None:
    """Make `import transformer_engine` find the fake from now on."""
    for suffix, content in CONTENT.items():
        if suffix == ".pytorch.fp8" and not has_fp8:
            continue
        name = f"transformer_engine{suffix}"
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(content)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
