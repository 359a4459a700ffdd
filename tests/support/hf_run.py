"""Hugging Face's run of the packed example, one context at a time, with torch's own autograd: what the policy is compared with."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings
from megatron_rl.minibatches import WeightedContext
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Context
from tests.support.packed import example_contexts
from tools.convert.verify import logits_of

TEMPERATURE = 0.7
MODULES = (
    r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
    r"|model\.visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate|up|down)_proj)|merger\.mlp\.(0|2))"
)
"""Every linear layer that an adapter may be of."""


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def hf_logits(model: Qwen2_5_VLForConditionalGeneration, renderer: Renderer, context: Context) -> torch.Tensor:
    """HF's own forward of one context: logits [L, vocabulary]."""
    return logits_of(model, context, image_token_id=renderer.image_token_id)


def sampled_distribution(logits: torch.Tensor, banned_ids: list[int]) -> torch.Tensor:
    """log softmax at the sampling temperature over the ids that may be sampled."""
    keep = torch.ones(logits.shape[-1], dtype=torch.bool)
    keep[banned_ids] = False
    return (logits / TEMPERATURE).masked_fill(~keep, float("-inf")).log_softmax(-1)


def write_adapter(model: Path, folder: Path) -> Path:
    """Made by PEFT alone, with B as large as A, so that no part of it is a no-op."""
    torch.manual_seed(0)
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(folder)
    return folder


class HfRun:
    """What HF computes on the same contexts, one sequence at a time, with torch's own autograd.

    In float64, so that the rounding seen is the policy's own (HF's norms and rotary angles stay in float32).
    """

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """With the LoRA adapter of a PEFT folder, its gradients alone."""
        self.renderer = Renderer(ModelSettings(path=str(folder)))
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
        if adapter:
            self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        self.model.double()
        self.contexts: list[WeightedContext] = example_contexts(self.renderer)
        logits, logprobs, loss = [], [], 0.0
        for weighted in self.contexts:
            rows = [t for t in range(weighted.num_tokens - 1) if weighted.context.loss_mask[t + 1]]
            row_logits = hf_logits(self.model, self.renderer, weighted.context)[rows]
            distribution = sampled_distribution(row_logits, self.renderer.banned_ids)
            targets = torch.tensor([weighted.context.token_ids[t + 1] for t in rows])
            logprob = distribution.gather(1, targets[:, None])[:, 0]
            entropy = -(distribution.exp() * distribution.masked_fill(distribution.isinf(), 0.0)).sum(-1)
            loss = loss - (weighted.weight * (logprob + 0.3 * entropy)).sum()
            logits.append(row_logits.detach())
            logprobs.append(logprob.detach())
        loss = loss / sum(weighted.denominator for weighted in self.contexts)
        loss.backward()
        self.logits, self.logprobs, self.loss = torch.cat(logits), torch.cat(logprobs), loss.item()
        # transformers 5 names its modules the newer way; checkpoints, and our stream, the released way.
        rename = {"model.language_model.": "model.", "model.visual.": "visual."}
        self.gradients = {}
        for name, parameter in self.model.named_parameters():
            for newer, released in rename.items():
                name = released + name.removeprefix(newer) if name.startswith(newer) else name
            self.gradients[name] = parameter.grad


def logits_of_hf(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    renderer = Renderer(ModelSettings(path=str(folder)))
    rows = []
    with torch.no_grad():
        for weighted in example_contexts(renderer):
            keep = [t for t in range(weighted.num_tokens - 1) if weighted.context.loss_mask[t + 1]]
            rows.append(hf_logits(model, renderer, weighted.context)[keep].float())
    return torch.cat(rows)
