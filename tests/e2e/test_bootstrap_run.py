"""A PPO run with values of the final states of episodes that gymnasium truncates."""

from pathlib import Path

import pytest

from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.types import Rollout, StopReason, TokenSequence
from tests.support.picture_environments import MODULE

GAMMA, LAM = 0.5, 0.25
OVERRIDES = (
    "task=gymnasium", f"task.options.id={MODULE}:Still-v0", "+task.options.kwargs.max_episode_steps=2", "task.options.invalid=random",
    "task.options.image_side=140", "model.min_pixels=12000", "model.max_pixels=13000", "engine.kv_cache_mib=16", "task.max_turns=9",
    "task.max_new_tokens=8", "task.eval_samples=0", "algo=ppo", "algo.gae_level=turns", f"algo.gamma={GAMMA}", f"algo.lam={LAM}",
    "algo.whiten_advantages=false", "algo.bootstrap_truncated=true", "batch.prompts_per_step=2", "batch.group_size=2", "run.steps=2",
    "rollouts.save=all", "critic.lr=1e-2",
)  # fmt: skip


def turn_values(rollout: Rollout, column: str) -> list[float]:
    """Return each turn's entry of a column at its first token."""
    return [getattr(rollout.sequences[turn.sequence], column)[turn.token_span[0]] for turn in rollout.turns]


def key_of(context: TokenSequence, length: int) -> tuple:
    return tuple(context.token_ids[:length]), tuple(image.key for image in context.images)


@pytest.mark.parametrize("backbone", ["own", pytest.param("shared", marks=pytest.mark.long)])
def test_the_final_state_has_the_value_of_equal_contexts(backbone: str, torchrun, random_model: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """All states of this environment look equal, so the final state has the value of the turns. The
    second step, with a trained critic, has other values than the first. Advantages and returns
    equal a plain loop over the recorded values.
    """
    run = tmp_path / "run"
    torchrun(2, "launch/train.py", f"model.path={random_model}", f"run.dir={run}", f"critic.backbone={backbone}", *OVERRIDES)
    seen = []
    for step in range(2):
        rollouts = read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")
        assert len(rollouts) == 4 and {each.stop_reason for each in rollouts} == {StopReason.ENV_TRUNCATED}
        for rollout in rollouts:
            final, values = rollout.final_state, turn_values(rollout, "values")
            assert final.loss_mask == [0] * (len(final.token_ids) - 1) + [1]
            places = [(rollout.sequences[turn.sequence], turn.token_span[0]) for turn in rollout.turns]
            assert {key_of(context, start) for context, start in places} == {key_of(final, len(final.token_ids) - 1)}
            assert values == pytest.approx([final.values[-1]] * len(values), abs=1e-5) and len(values) == 2
            rewards = [turn.reward_delta for turn in rollout.turns]
            later, expected = 0.0, []
            for reward, value, after in zip(reversed(rewards), reversed(values), (final.values[-1], *reversed(values[1:])), strict=True):
                later = reward + GAMMA * after - value + GAMMA * LAM * later
                expected.insert(0, later)
            assert turn_values(rollout, "advantages") == pytest.approx(expected, abs=1e-5)
            assert turn_values(rollout, "returns") == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-5)
        seen.append(rollouts[0].final_state.values[-1])
    assert abs(seen[1] - seen[0]) > 1e-3
