"""Random agent transcripts through the real engine, observation images included.

Its logprobs equal HF's on the whole sequence.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration as HF

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Rollout
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, policy_logits
from tests.support.random_episodes import PROTOCOLS, make_episode

NUM = 240
SETTINGS = EpisodeSettings(temperature=1.0, max_turns=4, max_new_tokens=16, max_sequence_tokens=1500, max_images=6, seed=0)


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))


@pytest.fixture(scope="module")
def engine(random_model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    engine = ColocatedEngine(
        str(random_model), EngineSettings(max_model_len=1536, kv_cache_mib=128),
        special_tokens=renderer.special_tokens, group=None,
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def rollouts(engine: ColocatedEngine, renderer: Renderer) -> list[Rollout]:
    """Run all episodes concurrently.

    The policy is the model itself, whose random weights sample nonsense.
    """

    async def all_of_them() -> list[Rollout]:
        episodes = [
            make_episode(seed, renderer=renderer, engine=engine, protocol=PROTOCOLS[seed % len(PROTOCOLS)], settings=SETTINGS)[0]
            for seed in range(NUM)
        ]
        return await asyncio.gather(*episodes)

    return engine.run(all_of_them())


def test_the_engine_takes_every_transcript(rollouts: list[Rollout]) -> None:
    """The engine accepts every transcript; a rejected request would fail its rollout.

    Most transcripts have several turns, and most have an image after the first turn.
    """
    assert [rollout.reason for rollout in rollouts if rollout.reward is None] == []
    several = [rollout for rollout in rollouts if len(rollout.turns) > 1]
    seen_later = [rollout for rollout in rollouts if any(turn.images for turn in rollout.turns)]
    assert len(several) >= 0.6 * NUM and len(seen_later) >= 0.5 * NUM, (len(several), len(seen_later))


@pytest.mark.known_failure("later-images-unseen")
@pytest.mark.known_failure("shifted-logprobs")
@torch.no_grad()
def test_its_logprobs_are_those_of_hf_on_the_whole_sequence(rollouts: list[Rollout], renderer: Renderer, hf: HF) -> None:
    """The engine's logprobs equal those of one HF forward pass per transcript with HF's own
    positions, all images and all turns. The engine computed them turn by turn, with its caches."""
    gaps = []
    for rollout in rollouts:
        (context,) = rollout.sequences
        logits = policy_logits(hf, context.token_ids, context.images, renderer=renderer)
        next_T = torch.tensor(context.token_ids[1:])
        expected = logits.log_softmax(-1)[:-1].gather(1, next_T[:, None])[:, 0]
        sampled = torch.tensor(context.loss_mask[1:], dtype=torch.bool)
        claimed = torch.tensor(context.rollout_logprobs[1:], dtype=torch.float64)
        gaps.append((expected - claimed)[sampled].abs().max().item())
    print(f"{len(gaps)} transcripts, {sum(rollout.num_sampled for rollout in rollouts)} sampled tokens, largest gap {max(gaps):.1e}")
    assert len(gaps) >= 200 and max(gaps) <= LOGPROB_BOUND
