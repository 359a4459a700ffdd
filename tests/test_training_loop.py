"""Advantages, packing and logprob computation in training_batch.prepare_training_batch, with a
policy whose logprobs are scripted per token.
"""

import copy
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import training_batch, training_loop
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.distill import make_distill_term
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching import token_stats
from megatron_rl.batching.minibatches import PackItem, RankShares, balance_costs, pack_costs, split_by_cost
from megatron_rl.batching.packing import make_loss_inputs, pack
from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    CriticSettings,
    DistillSettings,
    FilterSettings,
    MergeSettings,
    RunSettings,
    Settings,
)
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.types import Image, MicroBatch, Rollout, Status, TokenSequence, Turn
from tests.support.rollout_factory import make_rollout

COEF = 0.25
SAYS: dict[str, Callable] = {
    "current": lambda token: -token / 64,
    "reference": lambda token: -(token % 7) / 8,
    "teacher": lambda token: -(token % 9) / 8,
}
"""Logprob of a sampled token under each set of weights, exact in float32. Each sampled token has an
id of its own.
"""
NO_IMAGE = 99


def VALUE(token: int) -> float:
    """Return the value of the state before a sampled token, exact in float32."""
    return (token % 5) / 4


def straight(token_ids: Sequence[int], images: Sequence[object]) -> torch.Tensor:
    """Return rotary positions for text without images."""
    return torch.arange(len(token_ids)).expand(3, -1)


@dataclass(slots=True)
class Scripted:
    """The policy of one data-parallel rank. It packs like the real policy, returns the logprobs of
    SAYS, and returns 77 for tokens that were not sampled.
    """

    rank: int = 0
    ranks: int = 1
    share: bool = True
    asked: list[str] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    updates: list[tuple] = field(default_factory=list)
    critic: "Scripted | None" = None
    seen_packed: list[TokenSequence] = field(default_factory=list)
    privileged_prompt: None = None
    routing: None = None
    demonstrations: Callable | None = None

    def shard_across_dp(self, minibatch: Sequence[PackItem], *, max_tokens: int) -> RankShares:
        return [
            split_by_cost(mine, max_tokens) for mine in balance_costs(pack_costs(minibatch, NO_IMAGE, share_prompts=self.share), self.ranks)
        ]

    def images(self, dealt: RankShares) -> dict[int, list[Image]]:
        """Return one image for each rank, whose key names the rank."""
        return {rank: [Image(None, None, (1, 2, 2), f"{rank}, {len(parts)}", 2)] for rank, parts in enumerate(dealt)}

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        return batch

    def pack_local(self, dealt: RankShares) -> list[MicroBatch]:
        self.seen_packed += [weighted.sequence for part in dealt[self.rank] for weighted in part]
        return [
            pack(part, image_token_id=NO_IMAGE, positions=straight, multiple_of=4, share_prompts=self.share) for part in dealt[self.rank]
        ]

    def logprobs(self, batches: list[MicroBatch], *, weights: str = "current") -> list[torch.Tensor]:
        self.asked.append(weights)
        by_teacher = weights == "teacher"  # logprobs of the second teacher are smaller by 1
        return [torch.where(batch.mask_T, SAYS[weights](batch.target_T) - by_teacher * batch.teacher, 77.0) for batch in batches]

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        self.asked.append("values")
        return [torch.where(batch.mask_T, VALUE(batch.target_T), 77.0) for batch in batches]

    def logprobs_and_values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        pairs = zip(self.logprobs(batches), self.values(batches), strict=True)
        self.asked[-2:] = ["both"]
        return [torch.stack(pair) for pair in pairs]

    def update_return_stats(self, returns: Sequence[float]) -> None:
        self.seen += returns

    def update(
        self,
        batches: list[MicroBatch],
        loss: Callable,
        *,
        step: int,
        value_head_only: bool = False,
        record: object = None,
        check: object = None,
    ) -> dict[str, float]:
        self.updates.append((batches, loss.__qualname__.split(".")[0], step, value_head_only))
        return {"loss": 1.0}


class CollectsItems(Scripted):
    """Collects the sequences with images that ranks ask for."""

    needed: list[PackItem]

    def images(self, dealt: RankShares) -> dict[int, list[Image]]:
        self.needed = [*getattr(self, "needed", []), *(item for parts in dealt for part in parts for item in part)]
        return {}


class ValueHeadStub:
    """A value head that returns the first hidden number."""

    def __call__(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH[:, 0]

    def normalize(self, values_R: torch.Tensor) -> torch.Tensor:
        return values_R


class Peers:
    """A gather function for ranks that are threads."""

    def __init__(self, num: int) -> None:
        self.handed_in, self.barrier, self.mine = [None] * num, threading.Barrier(num, timeout=20), threading.local()

    def gather(self, given: object) -> list:
        self.handed_in[self.mine.rank] = given
        self.barrier.wait()
        everyones = list(self.handed_in)
        self.barrier.wait()
        return everyones


def step() -> list[Rollout]:
    """Return four groups whose members share their prompt. Some members have a second sequence, and
    every sampled token has an id of its own.

    Member 1 of group 0 failed, group 1 is left with one member, and member 2 of group 2 is dropped.
    """
    ids, rollouts = iter(range(100, 1000)), []
    for number, reward in enumerate((1.0, None, 3.0, None, 4.0, None, 1.5, 2.0, -1.0, 6.0, 1.0, 1.0)):
        rollout = Rollout(task="t", example_id="e", group=number // 3, sample_index=number % 3, reward=reward)
        rollout.status = Status.FAILED if reward is None else Status.COMPLETED
        for place in range(1 + number % 2):
            context = TokenSequence()
            context.extend([5, 6, number // 3, 7])
            for _ in range(1 + (number + place) % 2):
                start, length = len(context.token_ids), 1 + number % 3
                context.extend([next(ids) for _ in range(length)], logprobs=[-1.0] * length)
                context.extend([8])
                rollout.turns.append(Turn(sequence=place, token_span=(start, start + length), text=""))
            rollout.sequences.append(context)
        rollouts.append(rollout)
    rollouts[4].filter_reason, rollouts[8].filter_reason = "no_peer", "stop_reason"
    return rollouts


def settings_of(algo: AlgoSettings, **batch: int) -> Settings:
    return Settings(algo=algo, batch=BatchSettings(prompts_per_step=4, micro_batch_tokens=24, **batch))


def sampled(rollout: Rollout) -> list[int]:
    return [token for context in rollout.sequences for token, mask in zip(context.token_ids, context.loss_mask, strict=True) if mask]


def by_token(batch: MicroBatch, column_T: torch.Tensor) -> dict[int, float]:
    rows_R = batch.mask_T.nonzero().flatten()
    return dict(zip(batch.target_T[rows_R].tolist(), column_T[rows_R].tolist(), strict=True))


def kl(token: int) -> float:
    return COEF * (SAYS["current"](token) - SAYS["reference"](token))


def leave_one_out(rollouts: list[Rollout]) -> dict[int, float]:
    """Return each sampled token's advantage, computed in plain loops: the episode's reward minus
    its KL, minus the mean of the other members of its group.
    """
    worth = {
        id(each): each.reward - (0 if each.filter_reason else sum(map(kl, sampled(each)))) for each in rollouts if each.reward is not None
    }
    credits = {}
    for rollout in rollouts:
        others = [worth[id(each)] for each in rollouts if each.group == rollout.group and each is not rollout and id(each) in worth]
        if id(rollout) in worth and others:
            credits |= dict.fromkeys(sampled(rollout), worth[id(rollout)] - sum(others) / len(others))
    return credits


def whitened(rollouts: list[Rollout]) -> dict[int, float]:
    """Return each sampled token's return, computed in plain loops and whitened over all tokens that
    are trained on.
    """
    returns = {}
    for rollout in rollouts:
        tokens = sampled(rollout) if rollout.is_trained_on else []
        returns |= {token: rollout.reward - sum(map(kl, tokens[place:])) for place, token in enumerate(tokens)}
    mean = sum(returns.values()) / len(returns)
    variance = sum((value - mean) ** 2 for value in returns.values()) / (len(returns) - 1)
    return {token: (value - mean) / math.sqrt(variance + 1e-8) for token, value in returns.items()}


def credited_on(
    ranks: int, settings: Settings, monkeypatch: pytest.MonkeyPatch, *, share: bool = True, own_critic: bool = False
) -> list[tuple]:
    """Return (rollouts, policy, mini-batches) for each rank."""
    peers = Peers(ranks)
    monkeypatch.setattr(token_stats, "all_gather_large_object", peers.gather)

    def one(rank: int) -> tuple[list[Rollout], Scripted, list[list[MicroBatch]]]:
        peers.mine.rank = rank
        rollouts, policy = step(), Scripted(rank=rank, ranks=ranks, share=share)
        policy.critic = Scripted() if own_critic else None
        algorithm = ALGORITHMS[settings.algo.name]
        minibatches = training_batch.prepare_training_batch(
            rollouts, settings, policy, policy.critic, algorithm=algorithm, fetch_images=lambda needed: None, step=0
        )
        return rollouts, policy, minibatches

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_images_of_final_states_are_fetched_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call fetches the images of the trained sequences and of the final states. The scripted
    policy needs one image per rank and mini-batch.
    """
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda value: [value])
    rollouts, shown = step(), []
    for rollout, has_final in zip(rollouts, (True, False) * 6, strict=True):
        rollout.final_state = TokenSequence([5, 6, 901], [0, 0, 1], [0.0] * 3, [-1, -1, 0]) if has_final else None
    for bootstraps in (True, False):
        algo = AlgoSettings(name="ppo", bootstrap_truncated=bootstraps)
        training_batch.prepare_training_batch(
            copy.deepcopy(rollouts), settings_of(algo, minibatches=2), Scripted(), algorithm=ALGORITHMS["ppo"], fetch_images=shown.append,
            step=0,
        )  # fmt: skip
    assert [len(needed[0]) for needed in shown] == [4, 2]


@pytest.mark.parametrize(("name", "textbook"), [("rloo", leave_one_out), ("reinforce_pp", whitened)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share", [True, False])
def test_the_kl_that_is_read_goes_back_to_the_contexts_and_into_the_advantages(
    name: str, textbook: Callable, ranks: int, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and reference logprobs are stored in the sequences on every rank, and the KL computed
    from them is part of the advantages. Oracle: plain loops over rollouts.
    """
    settings = settings_of(AlgoSettings(name=name, kl_coef=COEF, use_kl_in_reward=True), minibatches=2)
    done, trained, expected = credited_on(ranks, settings, monkeypatch, share=share), [], textbook(step())
    for rollouts, policy, minibatches in done:
        assert policy.asked == ["current", "current", "reference", "reference"] and len(minibatches) == 2
        for rollout in rollouts:
            for context in rollout.sequences:
                for column, weights in (("old_logprobs", "current"), ("reference_logprobs", "reference")):
                    said = [SAYS[weights](token) * mask for token, mask in zip(context.token_ids, context.loss_mask, strict=True)]
                    assert getattr(context, column) == (said if rollout.is_trained_on else []), "of every rank's tokens, on every rank"
        for batch in (each for batches in minibatches for each in batches):
            given = by_token(batch, batch.advantage_T)
            trained += given
            assert given == {token: pytest.approx(expected[token], rel=1e-6) for token in given}
            assert not batch.advantage_T[~batch.mask_T].any()
            assert by_token(batch, batch.old_logprob_T) == {token: SAYS["current"](token) for token in given}
            assert by_token(batch, batch.ref_logprob_T) == {token: SAYS["reference"](token) for token in given}
        assert any(place >= 0 for batches in minibatches for batch in batches for place in batch.prefix_S) == share
    assert sorted(trained) == sorted(token for rollout in step() if rollout.is_trained_on for token in sampled(rollout)), "each once"
    first = [[context.advantages for rollout in rollouts for context in rollout.sequences] for rollouts, *_ in done]
    assert all(other == first[0] for other in first), "bit for bit the same on every rank"


def generalized(rollouts: list[Rollout], over: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return each sampled token's advantage and return, computed in plain loops with gamma 0.5 and
    lambda 0.25. The outcome reward is earned at the end, and reward deltas at the end of their
    turns.
    """
    advantages, returns = {}, {}
    for rollout in rollouts:
        if not rollout.is_trained_on:
            continue
        turns = [rollout.sequences[turn.sequence].token_ids[slice(*turn.token_span)] for turn in rollout.turns]
        actions = turns if over == "turns" else [[token] for turn in turns for token in turn]
        values = [VALUE(action[0]) for action in actions] + [0.0]
        later = 0.0
        for number in reversed(range(len(actions))):
            earned = (rollout.outcome_reward if number + 1 == len(actions) else 0.0) + sum(
                turn.reward_delta for turn, tokens in zip(rollout.turns, turns, strict=True) if tokens[-1] == actions[number][-1]
            )
            later = earned + 0.5 * values[number + 1] - values[number] + 0.125 * later
            advantages |= dict.fromkeys(actions[number], later)
            returns |= dict.fromkeys(actions[number], 0.0) | {actions[number][0]: later + values[number]}
    return advantages, returns


@pytest.mark.parametrize("over", ["tokens", "turns"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_a_critics_values_go_to_the_contexts_and_come_back_as_advantages_and_returns(
    over: str, ranks: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages and returns computed from the critic's values equal those of plain loops. With a
    shared backbone, one forward pass computes logprobs and values.
    """
    algo = AlgoSettings(name="ppo", gae_level=over, gamma=0.5, lam=0.25, whiten_advantages=False)
    done = credited_on(ranks, settings_of(algo, minibatches=2), monkeypatch, own_critic=own)
    advantages, returns = generalized(step(), over)
    trained: list[int] = []
    for rollouts, policy, minibatches in done:
        assert policy.asked == ["current" if own else "both"] * 2, "a trunk is gone through once"
        reader = policy.critic if own else policy
        assert not own or reader.asked == ["values"] * 2
        firsts = {each.sequences[turn.sequence].token_ids[turn.token_span[0]] for each in rollouts for turn in each.turns}
        actions = [t for each in rollouts if each.is_trained_on for t in sampled(each) if over == "tokens" or t in firsts]
        assert reader.seen == pytest.approx([returns[token] for token in actions])
        for batch in (each for batches in minibatches for each in batches):
            given = by_token(batch, batch.advantage_T)
            trained += given
            assert given == {token: pytest.approx(advantages[token], rel=1e-6) for token in given}
            assert by_token(batch, batch.return_T) == {token: pytest.approx(returns[token], rel=1e-6) for token in given}
            assert by_token(batch, batch.old_value_T) == {token: VALUE(token) for token in given}
            assert by_token(batch, batch.old_logprob_T) == {token: SAYS["current"](token) for token in given}
            assert batch.logprob_scale_T is None
    assert sorted(trained) == sorted(advantages), "each once"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_final_states_are_valued_once_and_not_trained_on(own: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final states of two rollouts, of which one is filtered out: the advantages of the other's
    last action grow by gamma * value, and the micro-batches have the same tokens as without them.
    """
    made = [step(), step()]
    for rollout, token in ((made[0][0], 903), (made[0][4], 904)):
        rollout.final_state = TokenSequence()
        rollout.final_state.extend([5, 6, 8])
        rollout.final_state.extend([token], logprobs=[0.0])
    algo = AlgoSettings(name="ppo", gamma=0.5, lam=0.0, whiten_advantages=False, bootstrap_truncated=True)
    runs = []
    for rollouts in made:
        monkeypatch.setattr("tests.test_training_loop.step", lambda rollouts=rollouts: copy.deepcopy(rollouts))
        runs.append(credited_on(ranks, settings_of(algo, minibatches=2), monkeypatch, own_critic=own))
    for (with_final, policy, batches), (without, _, plain) in zip(*runs, strict=True):
        reader = policy.critic if own else policy
        assert reader.asked.count("values") == 3 - 2 * (not own), "the mini-batches and one pass for the final states"
        assert with_final[0].final_state.values == [0.0, 0.0, 0.0, VALUE(903)] and with_final[4].final_state.values == []
        gained = [
            [a - b for c, d in zip(one.sequences, two.sequences, strict=True) for a, b in zip(c.advantages, d.advantages, strict=True)]
            for one, two in zip(with_final, without, strict=True)
        ]
        last = [place for place, sampled in enumerate(with_final[0].sequences[0].loss_mask) if sampled][-1]
        expected = [0.5 * VALUE(903) if place == last else 0.0 for place in range(len(gained[0]))]
        assert gained[0] == pytest.approx(expected) and not any(value for row in gained[1:] for value in row)
        tokens, old = ([batch.token_T.tolist() for each in found for batch in each] for found in (batches, plain))
        assert tokens == old and VALUE(903) > 0


def test_thoughts_count_less_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before each turn's action have the coefficient of 0.5, and all other tokens have 1."""
    made = step()
    for rollout in made:
        for turn in rollout.turns:
            turn.action_start = turn.token_span[1] - 1
    monkeypatch.setattr("tests.test_training_loop.step", lambda: made)
    ((rollouts, _, minibatches),) = credited_on(1, settings_of(AlgoSettings(thought_logprob_scale=0.5)), monkeypatch)
    actions = {rollout.sequences[turn.sequence].token_ids[turn.action_start] for rollout in rollouts for turn in rollout.turns}
    found = {
        token: value for batches in minibatches for batch in batches for token, value in by_token(batch, batch.logprob_scale_T).items()
    }
    assert found == {token: 1.0 if token in actions else 0.5 for token in found} and set(found.values()) == {0.5, 1.0}


@pytest.mark.parametrize(
    ("name", "trunk", "step", "policy", "critic"),
    [
        ("grpo", "shared", 0, [("make_policy_objective", False)], []),  # without values there is no warmup
        ("ppo", "shared", 1, [("warmup_value_loss", True)], []),
        ("ppo", "shared", 2, [("shared_value_loss", False)], []),
        ("ppo", "own", 1, [], ["make_value_objective"]),
        ("ppo", "own", 2, [("make_policy_objective", False)], ["make_value_objective"]),
    ],
)
def test_what_learns_in_a_step(name: str, trunk: str, step: int, policy: list, critic: list) -> None:
    """Only the value head or the critic is updated during the two steps of critic warmup."""
    settings = Settings(algo=AlgoSettings(name=name), critic=CriticSettings(backbone=trunk, warmup_steps=2))
    ours, theirs = Scripted(), Scripted() if trunk == "own" else None
    training_loop.make_updaters(settings, ours, theirs, ALGORITHMS)(["batch"], step)
    assert ours.updates == [(["batch"], loss, step, alone) for loss, alone in policy]
    assert (theirs.updates if theirs else []) == [(["batch"], loss, step, False) for loss in critic]


def test_on_policy_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An on-policy step computes no logprobs. Advantages are computed first, and sequences with
    only zero advantages are omitted. The ranks need not communicate.
    """
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda _: pytest.fail("ranks talked"))
    rollouts, policy = step(), Scripted()
    rollouts[9].reward = rollouts[10].reward = rollouts[11].reward = 1.0
    ((*batches,),) = training_batch.prepare_training_batch(
        rollouts, settings_of(AlgoSettings(name="rloo")), policy, algorithm=ALGORITHMS["rloo"], fetch_images=lambda needed: None, step=0
    )
    assert policy.asked == []
    assert {(batch.old_logprob_T, batch.ref_logprob_T) for batch in batches} == {(None, None)}
    left = {0: -2.0, 2: 2.0, 6: 1.0, 7: 1.75}  # 1 vs. 3; 1.5 vs. 2 and the dropped -1; 2 vs. 1.5 and -1
    found = {token: value for batch in batches for token, value in by_token(batch, batch.advantage_T).items()}
    assert found == {token: value for index, value in left.items() for token in sampled(rollouts[index])}
    assert [id(context) for context in policy.seen_packed] == [id(context) for index in left for context in rollouts[index].sequences]
    assert sum(batch.denominator for batch in batches) == sum(each.num_sampled for each in rollouts if each.is_trained_on)


@pytest.mark.parametrize(("apply_to", "asked"), [("loss", ["teacher"]), ("reward", ["current", "teacher"])])
def test_a_teacher_reads_every_sequence(apply_to: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences without advantages are kept, and with apply_to=reward each token's advantage is that
    of RLOO plus coef * (teacher logprob - old logprob).
    """
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda columns: [columns])
    rollouts, policy = step(), Scripted()
    rollouts[9].reward = rollouts[10].reward = rollouts[11].reward = 1.0
    settings = replace(settings_of(AlgoSettings(name="rloo")), distill=DistillSettings(teacher="t", apply_to=apply_to, coef=COEF))
    ((*batches,),) = training_batch.prepare_training_batch(
        rollouts, settings, policy, algorithm=ALGORITHMS["rloo"], fetch_images=lambda needed: None, step=0
    )
    assert policy.asked == asked
    own = {0: -2.0, 2: 2.0, 6: 1.0, 7: 1.75}  # as in the test above; all others are 0
    trained = {index: each for index, each in enumerate(rollouts) if each.is_trained_on}
    expected = {token: own.get(index, 0.0) for index, each in trained.items() for token in sampled(each)}
    if apply_to == "reward":
        expected = {token: value + COEF * (SAYS["teacher"](token) - SAYS["current"](token)) for token, value in expected.items()}
    assert {token: value for batch in batches for token, value in by_token(batch, batch.advantage_T).items()} == pytest.approx(expected)
    found = {token: value for batch in batches for token, value in by_token(batch, batch.teacher_logprob_T).items()}
    assert found == {token: SAYS["teacher"](token) for token in expected}


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_demonstrations_join_the_rollouts(ranks: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstrations of the step are divided among the mini-batches in order, in micro-batches
    of their own, with the weights and denominators of episodes. Rollouts keep their micro-batch
    inputs, and no rank asks for images of demonstrations. A step without a teacher has none."""
    peers, demonstrations = Peers(ranks), []
    monkeypatch.setattr(token_stats, "all_gather_large_object", peers.gather)
    for number in range(3):
        demonstrations.append(TokenSequence())
        demonstrations[-1].extend([5, 6])
        demonstrations[-1].extend([2000 + 10 * number + place for place in range(1 + number)], logprobs=[0.0] * (1 + number))
    settings = settings_of(AlgoSettings(name="rloo"), minibatches=2, loss_agg_mode=mode)

    def prepare(rank: int, distill: DistillSettings) -> tuple[list, list[int]]:
        peers.mine.rank = rank
        policy, asked = CollectsItems(rank, ranks), []
        policy.demonstrations = lambda step: [asked.append(step), demonstrations][1]
        minibatches = training_batch.prepare_training_batch(
            step(), replace(settings, distill=distill), policy, algorithm=ALGORITHMS["rloo"], fetch_images=lambda _: None, step=5
        )
        assert policy.needed and not any(item.is_demonstration for item in policy.needed)
        return minibatches, asked

    found = {}
    for fraction in (0.0, 0.2):
        distill = DistillSettings(teacher="t", data_fraction=fraction)
        with ThreadPoolExecutor(ranks) as threads:
            results = list(threads.map(lambda rank, distill=distill: prepare(rank, distill), range(ranks)))
        assert [asked for _, asked in results] == [[5] if fraction else []] * ranks
        found[fraction] = [[batch for minibatches, _ in results for batch in minibatches[place]] for place in range(2)]
    for place, own in ((0, [0, 1]), (1, [2])):
        plain, mixed = found[0.0][place], found[0.2][place]
        data = [batch for batch in mixed if batch.is_demonstration]
        others = [batch for batch in mixed if not batch.is_demonstration]
        expected = {2000 + 10 * n + t: 1.0 if mode == "token_mean" else 1 / (1 + n) for n in own for t in range(1 + n)}
        assert {token: w for batch in data for token, w in by_token(batch, batch.weight_T).items()} == pytest.approx(expected)
        assert sum(batch.denominator for batch in data) == (len(expected) if mode == "token_mean" else len(own))
        assert all(not batch.advantage_T.any() and batch.teacher_logprob_T is not None for batch in data)
        for column in ("advantage_T", "weight_T", "old_logprob_T"):
            one, two = ({t: v for b in each for t, v in by_token(b, getattr(b, column)).items()} for each in (plain, others))
            assert one == two and one
        assert sum(batch.denominator for batch in plain) == sum(batch.denominator for batch in others)


def test_each_data_source_has_its_own_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups 0 and 3 learn from the first teacher, group 2 from the second one, with logprobs
    smaller by 1. Without a teacher, group 2 keeps the advantages of RLOO, and records no logprobs."""
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda columns: [columns])
    own = {0: -2.0, 2: 2.0, 6: 1.0, 7: 1.75}  # as in the test above the last one; all others are 0
    for second, lacks in (("two", False), ("", True)):
        rollouts = step()
        for rollout in rollouts:
            rollout.source = "b" if rollout.group == 2 else "a"
        rollouts[9].reward = rollouts[10].reward = rollouts[11].reward = 1.0
        distill = DistillSettings(teachers={"a": "one", "b": second}, apply_to="reward", coef=COEF)
        ((*batches,),) = training_batch.prepare_training_batch(
            rollouts, replace(settings_of(AlgoSettings(name="rloo")), distill=distill), Scripted(), algorithm=ALGORITHMS["rloo"],
            fetch_images=lambda needed: None, step=0,
        )  # fmt: skip
        assert {batch.teacher for batch in batches} == {0, -1 if lacks else 1}
        advantages = {token: value for batch in batches for token, value in by_token(batch, batch.advantage_T).items()}
        for index, rollout in enumerate(rollouts):
            if not rollout.is_trained_on:
                continue
            for token in sampled(rollout):
                teacher = SAYS["teacher"](token) - (rollout.group == 2)
                gain = 0.0 if lacks and rollout.group == 2 else COEF * (teacher - SAYS["current"](token))
                assert advantages[token] == pytest.approx(own.get(index, 0.0) + gain)
            recorded = [bool(sequence.teacher_logprobs) for sequence in rollout.sequences if any(sequence.loss_mask)]
            assert recorded == [not (lacks and rollout.group == 2)] * len(recorded)


@pytest.mark.parametrize(
    ("algo", "batch", "asked"),
    [
        ({"rollout_correction": "token_tis"}, {}, []),
        ({"entropy_coef": 0.1}, {}, []),
        ({}, {"epochs": 2}, ["current"]),
        ({}, {"minibatches": 2}, ["current"] * 2),
        ({"kl_coef": 0.1}, {}, ["reference"]),
        ({"kl_coef": 0.1}, {"epochs": 3, "minibatches": 2}, ["current"] * 2 + ["reference"] * 2),
        ({"kl_coef": 0.1, "use_kl_in_reward": True}, {}, ["current", "reference"]),
        ({"rollout_correction": "bypass"}, {"minibatches": 2}, []),
        ({"rollout_correction": "bypass+opsm"}, {"epochs": 2}, []),
        ({"rollout_correction": "sequence_mask"}, {"epochs": 2}, ["current"]),
        ({"rollout_correction": "bypass", "kl_coef": 0.1, "use_kl_in_reward": True}, {"minibatches": 2}, ["reference"] * 2),
        ({"rollout_correction": "bypass", "name": "ppo"}, {"minibatches": 2}, ["values"] * 2),
        ({"name": "ppo"}, {}, ["values"]),
        ({"name": "ppo", "kl_coef": 0.1}, {"minibatches": 2}, ["both"] * 2 + ["reference"] * 2),
    ],
)
def test_every_minibatch_is_read_once_by_each_network_that_is_needed(
    algo: dict, batch: dict, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mini-batch gets one forward pass per model whose output the settings need, and none
    otherwise.
    """
    ((_, policy, minibatches),) = credited_on(1, settings_of(AlgoSettings(**algo), **batch), monkeypatch)
    assert policy.asked == asked
    batches = [each for batches in minibatches for each in batches]
    assert {each.old_logprob_T is not None for each in batches} == {"current" in asked or "both" in asked}
    assert {each.ref_logprob_T is not None for each in batches} == {"reference" in asked}
    assert sum(int(each.mask_T.sum()) for each in batches) == sum(each.num_sampled for each in step() if each.is_trained_on)


def test_the_pictures_of_a_whole_step_are_shown_before_any_of_it_is_packed() -> None:
    """The images of the whole step are fetched once before packing; each rank gets those of its
    share of every update.
    """
    policy, settings, shown = Scripted(ranks=2), settings_of(AlgoSettings(name="rloo"), minibatches=2), []

    def show(needed: dict[int, list[Image]]) -> None:
        assert not policy.seen_packed
        shown.append({rank: [image.key for image in images] for rank, images in needed.items()})

    minibatches = training_batch.prepare_training_batch(step(), settings, policy, algorithm=ALGORITHMS["rloo"], fetch_images=show, step=0)
    assert len(minibatches) == 2 and policy.seen_packed
    (needed,) = shown
    assert {rank: [key[:3] for key in keys] for rank, keys in needed.items()} == {0: ["0, "] * 2, 1: ["1, "] * 2}


def test_a_batch_knows_which_tokens_the_steps_own_weights_sampled() -> None:
    """Every third sampled token has the previous weight version and is marked as off-policy. In a
    synchronous run, no token is marked.
    """
    rollouts, current = step(), {}
    for rollout in rollouts:
        for context in rollout.sequences:
            for place, token in enumerate(context.token_ids):
                if context.loss_mask[place]:
                    context.weight_versions[place] = 5 - (token % 3 == 0)
                    current[token] = float(token % 3 != 0)
    settings = settings_of(AlgoSettings(name="rloo"))
    given = {"algorithm": ALGORITHMS["rloo"], "fetch_images": lambda needed: None, "step": 5}
    assert {
        batch.on_policy_T for batches in training_batch.prepare_training_batch(rollouts, settings, Scripted(), **given) for batch in batches
    } == {None}
    settings = replace(settings, run=RunSettings(dir="none", max_staleness=1))
    found = {}
    for batches in training_batch.prepare_training_batch(rollouts, settings, Scripted(), **given):
        for batch in batches:
            assert not batch.on_policy_T[~batch.mask_T].any()
            found |= by_token(batch, batch.on_policy_T.float())
    assert len(found) > 20 and found == {token: current[token] for token in found} and set(found.values()) == {0.0, 1.0}


@pytest.mark.parametrize("in_reward", [True, False])
def test_where_nothing_is_trained_on_nothing_is_packed_or_read(in_reward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all rollouts are filtered, nothing is packed and no forward pass runs, but the recorded
    rollouts still have advantages.
    """
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda mine: [mine])
    rollouts, policy = step(), Scripted()
    for rollout in rollouts:
        rollout.filter_reason = "stop_reason" if rollout.is_scored else ""
    settings = settings_of(AlgoSettings(kl_coef=0.1, use_kl_in_reward=in_reward))
    assert (
        training_batch.prepare_training_batch(
            rollouts, settings, policy, algorithm=ALGORITHMS[settings.algo.name], fetch_images=lambda needed: None, step=0
        )
        == []
    )
    assert (policy.asked, policy.seen_packed) == ([], [])
    assert all(any(context.advantages) for context in rollouts[0].sequences), "the recorder shows what it would have been credited with"


def test_enough_is_as_many_groups_as_a_step_wants_by_the_credit_it_uses() -> None:
    """One group has equal rewards, one has rewards that are equal in total but differ by turn, one
    has different rewards, and one has a single scored member. The number of usable groups depends
    on the turn credit and the filter.
    """

    def made() -> list[Rollout]:
        by_turn = [make_rollout(1, outcome_reward=0.0, reward_deltas=gains) for gains in ((1.0, 0.0), (0.0, 1.0))]
        return [
            make_rollout(0, 1.0),
            make_rollout(0, 1.0),
            *by_turn,
            make_rollout(2, 0.0),
            make_rollout(2, 1.0),
            make_rollout(3, 9.0),
            make_rollout(3),
        ]

    for turns, drop, kept in (("broadcast", [], 3), ("broadcast", ["zero_std"], 1), ("return_to_go", ["zero_std"], 2)):
        for wanted in (1, 2, 3, 4):
            batch = BatchSettings(prompts_per_step=wanted)
            settings = Settings(algo=AlgoSettings(turn_credit=turns), filter=FilterSettings(drop=drop), batch=batch)
            rollouts = made()
            assert training_loop.fills_batch(rollouts, settings, ALGORITHMS[settings.algo.name]) == (kept >= wanted)
            assert rollouts[6].filter_reason == "no_peer"


@pytest.mark.parametrize("mode", ["token_mean", "turn_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_the_gradient_with_responses_is_that_of_two_means(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of two mini-batches, the loss is that of the rollouts plus COEF times the mean
    negative log-likelihood of the responses' thoughts, by plain loops over a table of logits. The
    responses have no value loss, and ranks ask for their images.
    """
    monkeypatch.setattr(token_stats, "all_gather_large_object", lambda columns: [columns])
    spans, responses = [[2000], [2010, 2011], [2020, 2021, 2022]], []
    for span in spans:
        responses.append(TokenSequence())
        responses[-1].extend([5, 6])
        responses[-1].extend([*span, 7], logprobs=[0.0] * (len(span) + 1))
        responses[-1].exclude_from_loss(len(span) + 2, len(span) + 3)
    distill = DistillSettings(merge=MergeSettings(method="mean"), apply_to="responses", coef=COEF)
    scale = {"loss_scale_factor": 16} if mode == "fixed_length" else {}
    settings = replace(settings_of(AlgoSettings(name=name), minibatches=2, loss_agg_mode=mode, **scale), distill=distill)

    def gradients(with_responses: bool) -> tuple[list[torch.Tensor], list[int]]:
        policy, found, denominators = CollectsItems(), [], []
        minibatches = training_batch.prepare_training_batch(
            step(), settings, policy, algorithm=ALGORITHMS[name], fetch_images=lambda _: None, step=5,
            responses=responses if with_responses else (),
        )  # fmt: skip
        assert "teacher" not in policy.asked and any(item.is_demonstration for item in policy.needed) == with_responses
        loss = make_policy_objective(settings.algo, distill=make_distill_term(distill, step=5))
        for batches in minibatches:
            table = (torch.arange(3000.0) % 11 / 7).requires_grad_()
            logprobs, total = table.log_softmax(0), sum(batch.denominator for batch in batches)
            for batch in batches:
                rows = make_loss_inputs(batch, batch.row_R, logprobs[batch.target_T[batch.row_R]], torch.zeros(len(batch.row_R)))
                (loss(rows)[0] / total).backward(retain_graph=True)
            found.append(table.grad)
            denominators.append(total)
        return found, denominators

    (plain, denominators), (mixed, same) = gradients(False), gradients(True)
    assert denominators == same
    for place, own in ((0, spans[:2]), (1, spans[2:])):
        table = (torch.arange(3000.0) % 11 / 7).requires_grad_()
        nll = -table.log_softmax(0)
        sums = [nll[span].sum() for span in own]
        if mode in ("sequence_mean", "turn_mean"):
            mean = sum(total / len(span) for total, span in zip(sums, own, strict=True)) / len(own)
        elif mode == "fixed_length":
            mean = sum(sums) / (len(own) * settings.batch.loss_scale_factor)
        else:
            mean = sum(sums) / sum(map(len, own))
        (COEF * mean).backward()
        assert (mixed[place] - plain[place] - table.grad).abs().max() <= 1e-5 and table.grad.abs().max() > 1e-3


def test_responses_have_no_value_loss() -> None:
    """Responses have no returns, so that their weight in the value loss is 0; rollouts keep theirs."""
    batch = pack([PackItem(TokenSequence([5, 6, 7], [0, 1, 1], [0.0] * 3, [-1, 0, 0], []))], image_token_id=NO_IMAGE, positions=straight)
    batch = replace(batch, old_value_T=torch.ones(3), return_T=torch.zeros(3))
    for is_demonstration, expected in ((False, [1.0, 1.0]), (True, [0.0, 0.0])):
        model = SimpleNamespace(network=SimpleNamespace(chunks=[SimpleNamespace(value_head=ValueHeadStub())]))
        rows = TrainableModel._value_loss_inputs(model, replace(batch, is_demonstration=is_demonstration), batch.row_R, torch.ones(2, 4))
        assert rows.weight_R.tolist() == expected
