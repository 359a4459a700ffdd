"""RouterReplay against hand-computed choices, and the settings that refuse routing replay."""

import torch

from megatron_rl.policy.routing_replay import BatchRouting, RouterReplay, has_experts

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3], [0.3, 0.1, 0.2, 0.4], [0.1, 0.2, 0.4, 0.3]])
OWN = [[1, 2], [0, 3], [3, 0], [2, 3]]


def compute_topk(scores: torch.Tensor, topk: int, *, num_groups: int | None, group_topk: int | None) -> tuple:
    assert num_groups is None and group_topk is None
    return scores.topk(topk)


def route(routing: BatchRouting, layer: int) -> tuple[list, list]:
    values, indices = RouterReplay(routing, layer).get_replay_topk(SCORES, 2, None, None, compute_topk)
    return values.tolist(), indices.tolist()


def test_own_choices_are_recorded() -> None:
    """The layer's part of the tensor receives the choices, and the pass uses them."""
    experts = torch.zeros(4, 3, 2, dtype=torch.uint8)
    values, indices = route(BatchRouting(experts, is_recording=True), 1)
    assert indices == OWN == experts[:, 1].tolist() and values == SCORES.topk(2).values.tolist()
    assert not experts[:, [0, 2]].any()


def test_given_experts_are_used_with_their_own_scores() -> None:
    """Given experts are used, in any order; a row of equal numbers leaves the choice to the router.
    Only other experts are a difference, not another order.
    """
    experts = torch.full((4, 3, 2), 7, dtype=torch.uint8)
    experts[:, 2] = torch.tensor([[3, 0], [3, 0], [0, 0], [2, 3]])
    routing = BatchRouting(experts, is_recording=False)
    values, indices = route(routing, 2)
    assert indices == [[3, 0], [3, 0], OWN[2], [2, 3]]
    assert values == [[SCORES[token, expert].item() for expert in row] for token, row in enumerate(indices)]
    assert routing.differs_T[2].tolist() == [True, False, False, False]
    assert has_experts(experts)[:, 2].tolist() == [True, True, False, True] and not has_experts(experts)[:, 0].any()
