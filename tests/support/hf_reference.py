"""The oracle for the policy:

Hugging Face's model on the packed example, one sequence at a time, with torch's own autograd.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import ModelSettings
from megatron_rl.models.name_mapping import canonical_name, is_expert_tensor
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import TokenSequence
from megatron_rl_tools.convert import verify
from tests.support.packed_example import make_example_items

TEMPERATURE = 0.7
MODULES = (
    r"model\.language_model\.layers\.\d+\."
    r"(self_attn\.(q|k|v|o)_proj|linear_attn\.(in_proj_(qkv|z|b|a)|out_proj)|mlp\.(shared_expert\.)?(gate|up|down)_proj)"
    r"|model\.visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.((gate|up|down)_proj|(linear_)?fc[12]))|merger\.mlp\.(0|2))"
    r"|model\.visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]"
)
"""All linear layers that may have an adapter, in any model family."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def delta_rule_in_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return outputs and state of the gated delta rule for float64 inputs, one token at a time.

    HF computes the rule in float32 also in a float64 model. Other inputs are passed on to HF.
    """
    if v.dtype != torch.float64:
        return HF_DELTA_RULE(q, k, v, g=g, beta=beta, **options)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outputs = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for token in range(v.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        change = (v[:, token] - (state * k[:, token, :, :, None]).sum(-2)) * beta[:, token, :, None]
        state = state + k[:, token, :, :, None] * change[:, :, None]
        outputs.append((state * q[:, token, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


HF_DELTA_RULE = modeling_qwen3_5.torch_chunk_gated_delta_rule
for modeling in (modeling_qwen3_5, modeling_qwen3_5_moe):  # the same function, generated twice
    modeling.torch_chunk_gated_delta_rule = delta_rule_in_float64


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def to_released_form(name: str, tensor: torch.Tensor | None, model_type: str = "qwen3_vl_moe") -> torch.Tensor | None:
    """Return a tensor of HF's model in the form of released checkpoints, in which the last two
    dimensions of Qwen3-VL's experts are swapped.
    """
    is_swapped = tensor is not None and tensor.dim() == 3 and is_expert_tensor(name) and model_type != "qwen3_5_moe"
    return tensor.transpose(-1, -2) if is_swapped else tensor


def compute_logits(model: PreTrainedModel, renderer: Renderer, context: TokenSequence) -> torch.Tensor:
    """Return the logits [L, vocabulary] of HF's own forward pass over one sequence."""
    return verify.compute_logits(model, context, image_token_id=renderer.image_token_id)


def sampled_log_softmax(logits: torch.Tensor, banned_ids: list[int]) -> torch.Tensor:
    """Return the log-softmax at the sampling temperature over the ids that may be sampled."""
    keep = torch.ones(logits.shape[-1], dtype=torch.bool)
    keep[banned_ids] = False
    return (logits / TEMPERATURE).masked_fill(~keep, float("-inf")).log_softmax(-1)


def write_adapter(model: Path, folder: Path) -> Path:
    """Write an adapter made by PEFT alone.

    B is as large as A, so that no part of the adapter is a no-op. Experts have adapters, of rank 8.
    """
    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    own = {"r": 8, "target_parameters": EXPERTS} if base.config.model_type in ("qwen3_vl_moe", "qwen3_5_moe") else {"r": 4}
    adapted = get_peft_model(base, LoraConfig(lora_alpha=8, target_modules=MODULES, task_type="CAUSAL_LM", **own))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(folder)
    return folder


def compute_forward(
    model: PreTrainedModel, renderer: Renderer, contexts: list[PackItem]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [R, V] and logprobs [R] of the sampled tokens, and the loss of
    layouts.weighted_nll divided by the denominators, with its graph.
    """
    logits, logprobs, loss = [], [], torch.tensor(0.0)
    for weighted in contexts:
        rows = [t for t in range(weighted.num_tokens - 1) if weighted.sequence.loss_mask[t + 1]]
        row_logits = compute_logits(model, renderer, weighted.sequence)[rows]
        distribution = sampled_log_softmax(row_logits, renderer.banned_ids)
        targets = torch.tensor([weighted.sequence.token_ids[t + 1] for t in rows])
        logprob = distribution.gather(1, targets[:, None])[:, 0]
        entropy = -(distribution.exp() * distribution.masked_fill(distribution.isinf(), 0.0)).sum(-1)
        loss = loss - (weighted.weight * (logprob + 0.3 * entropy)).sum()
        logits.append(row_logits.detach())
        logprobs.append(logprob.detach())
    return torch.cat(logits), torch.cat(logprobs), loss / sum(weighted.denominator for weighted in contexts)


class HfReference:
    """HF's results for the example sequences, one sequence at a time, with torch's own autograd.

    The model runs in float64, so that differences are the policy's own rounding errors (HF's norms
    and rotary angles stay in float32).
    """

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """Load the model.

        With the LoRA adapter of a PEFT folder, only the adapter has gradients.
        """
        self.folder, self.renderer = folder, Renderer(ModelSettings(path=str(folder)))
        self.model = AutoModelForImageTextToText.from_pretrained(folder, experts_implementation="eager")  # the other one has no float64
        if adapter:
            self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        self.contexts: list[PackItem] = make_example_items(self.renderer)
        with torch.no_grad():
            logits, logprobs, _ = compute_forward(self.model, self.renderer, self.contexts)
        self.model.double()
        self.logits, self.logprobs, loss = compute_forward(self.model, self.renderer, self.contexts)
        self.rounding_error = max((logits - self.logits).abs().max().item(), (logprobs - self.logprobs).abs().max().item())
        """Largest difference between Hugging Face's own float32 and float64 logits and logprobs on
        this processor.
        """
        assert self.rounding_error < 2e-5
        loss.backward()
        self.loss = loss.item()
        kind = self.model.config.model_type
        self.gradients = {canonical_name(name): to_released_form(name, p.grad, kind) for name, p in self.model.named_parameters()}

    @property
    def tolerance(self) -> float:
        """Largest allowed difference of logits and logprobs in float32.

        The bound is 1e-5 for Qwen2.5-VL and 1e-5 of the logits' standard deviation for families
        whose random weights produce larger logits. On processors where Hugging Face's own float32
        results differ from its float64 results by more (1.13e-5 was measured without AVX-512), the
        bound is 1.2 times this difference.
        """
        scale = self.logits.std().item()
        assert 1 < scale < 5
        stated = 1e-5 if self.model.config.model_type == "qwen2_5_vl" else 1e-5 * scale
        return stated if self.rounding_error <= stated else 1.2 * self.rounding_error


def compute_hf_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    renderer = Renderer(ModelSettings(path=str(folder)))
    rows = []
    with torch.no_grad():
        for weighted in make_example_items(renderer):
            keep = [t for t in range(weighted.num_tokens - 1) if weighted.sequence.loss_mask[t + 1]]
            rows.append(compute_logits(model, renderer, weighted.sequence)[keep].float())
    return torch.cat(rows)
