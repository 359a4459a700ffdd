"""Formulas for the memory of layers with experts: activations, temporary tensors and gradients."""

import torch

from megatron_rl.config import ParallelSettings
from megatron_rl.models.model_spec import ModelSpec

ROUTING_BYTES = 12
"""Bytes that autograd saves for each token and expert of a router: masks, weights and scores."""
ROUTER_LOSS_BYTES = 8
"""Bytes that a router's losses save for each token and expert: logits and softmax in fp32."""
ROUTER_LOSS_TOKEN_BYTES = 12
"""Bytes that the losses of a router save for each token: logsumexp and two copies of its weight."""


def expert_saved_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> float:
    """Return the bytes per token that autograd saves in a router and its experts.

    Each token has K rows, one per expert. A row consists of the input (H values, which are not
    divided by tp), the fused projection (2 F), the output of the activation function and its
    product with the router's weight (F each), and two indices. The router saves its input in fp32,
    which in fp32 is the norm's output, and a few numbers per expert. Under expert parallelism, a
    rank has the rows of its experts for the tokens of all ranks, which are as many if all experts
    are chosen equally often; this is assumed here.
    """
    experts, hidden = model.experts, model.hidden_size
    assert experts is not None
    row = (hidden + 4 * experts.ffn_size / parallel.tp) * itemsize + 2 * torch.int64.itemsize + torch.float32.itemsize
    router = hidden * (torch.float32.itemsize - itemsize) / (parallel.tp if parallel.sequence_parallel else 1)
    return experts.top_k * row + max(router, 0) + ROUTING_BYTES * experts.num_experts


def expert_working_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> float:
    """Return the bytes per token of the gradients in the backward pass of the experts.

    Gradients of rows exist one after the other: of its output in fp32 and in the model's dtype (H
    values each), of the product with the router's weight in both (2 F each), and of the fused
    projection (2 F) with that of its input (H). The gradients of the outputs of this rank's tokens
    are gathered from all ranks in fp32. They exist together with those of the rows' outputs.
    """
    experts, hidden = model.experts, model.hidden_size
    assert experts is not None
    columns = experts.ffn_size / parallel.tp
    of_output, of_product = ((torch.float32.itemsize + itemsize) * size for size in (hidden, 2 * columns))
    row = max(of_output, of_product, (hidden + 2 * columns) * itemsize)
    exchanged = (parallel.ep + 1) * hidden * torch.float32.itemsize if parallel.tp * parallel.ep > 1 else 0
    return max(experts.top_k * row, experts.top_k * of_output + exchanged)


def shared_expert_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> tuple[float, float]:
    """Return what a shared expert adds to the numbers of `activations._mlp_bytes`, or zeros.

    It saves the tensors of a dense MLP, its output before the gate (H values), the gate, and its
    input, unless that is the fp32 tensor that the router saves. In the backward pass, the gradient
    of its output exists as long as its own gradients.
    """
    assert model.experts is not None
    columns = model.experts.shared_ffn_size / parallel.tp
    if not columns:
        return 0.0, 0.0
    hidden = model.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    num_vectors = 1 if itemsize == torch.float32.itemsize else 2
    return (3 * columns + num_vectors * hidden + 2) * itemsize, hidden * itemsize


def router_loss_bytes(model: ModelSpec, parallel: ParallelSettings) -> float:
    """Return the bytes per token that the losses of a router save; 0 without experts.

    In the backward pass they need no more than the experts, which have released their own temporary
    tensors by then.
    """
    if model.experts is None:
        return 0.0
    of_token = ROUTER_LOSS_BYTES * model.experts.num_experts + ROUTER_LOSS_TOKEN_BYTES
    return of_token / (parallel.tp if parallel.sequence_parallel else 1)


def expert_gradient_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> int:
    """Return the bytes of the largest gradient in a layer with experts, that of linear_fc1.

    It exists until it has been added to the gradient buffer; that of linear_fc2 was added before.
    """
    if model.experts is None:
        return 0
    return 2 * model.experts.num_experts // parallel.ep * model.hidden_size * model.experts.ffn_size // parallel.tp * itemsize
