"""RouterReplay against hand-computed choices, and the pass that records experts."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.config import AlgoSettings, BatchSettings, ModelSettings, OptimSettings, RunSettings, Settings
from megatron_rl.policy.routing_replay import BatchRouting, RouterReplay, has_experts
from megatron_rl.training_batch import compute_logprobs_and_values
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world

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


def test_the_pass_of_old_logprobs_records(tmp_path: Path) -> None:
    """With algo.routing_replay=policy, the pass for old logprobs records the experts of all tokens
    but those of padding; the reference model neither records nor replays. Once recorded, experts
    are replayed with other weights.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, layers=3)
    settings = Settings(
        model=ModelSettings(path="there"), batch=BatchSettings(minibatches=2), run=RunSettings(dir="here"),
        algo=AlgoSettings(kl_coef=0.1, routing_replay="policy"),
    )  # fmt: skip
    with single_process_world():
        policy, renderer = make_policy_and_renderer(tmp_path / "moe", OptimSettings(), keep_reference=True)
        items = [replace(item, origin=(number, 0)) for number, item in enumerate(make_example_items(renderer)[:2])]
        (batch,) = policy.pack(items, max_tokens=1000)
        compute_logprobs_and_values([[batch]], settings, policy, None, has_values=False)
        assert has_experts(batch.routed_experts_TLK).all() and torch.equal(batch.old_logprob_T, batch.ref_logprob_T)
        gates = [parameter for name, parameter in policy.network.chunks.named_parameters() if name.endswith("router.weight")]
        with torch.no_grad():
            for gate in gates:
                gate.neg_()
        replayed = policy.logprobs([batch])[0]
        batch.routed_experts_TLK = (batch.routed_experts_TLK + 1) % 8
        assert torch.equal(policy.logprobs([batch], weights="reference")[0], batch.old_logprob_T)
        batch.routed_experts_TLK = None
        own = policy.logprobs([batch])[0]
        assert (replayed - own).abs().max() > 0.1
        settings.algo.routing_replay = "none"
        compute_logprobs_and_values([[batch]], settings, policy, None, has_values=False)
        assert batch.routed_experts_TLK is None and torch.equal(batch.old_logprob_T, own)
