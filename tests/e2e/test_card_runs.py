"""The card games with a real engine and real weight updates: recorded rollouts, training metrics
and evaluation metrics.
"""

import json
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.tasks.gym_cards.blackjack_table import POSITIONS
from tests.conftest import SUPPORT
from tests.support import fork_server

GAMES = ("ez_points", "points24", "blackjack")
FIGURES = {"success", "return", "tool_use", "failed_fraction", "invalid"}
OWN = {"ez_points": set(), "points24": {"success_of_solvable", "episodes"}, "blackjack": {"draws"}}


@pytest.fixture(scope="module")
def folder(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("card_runs")
    result = fork_server.run_script(SUPPORT / "card_game_runs.py", random_model, home, timeout_s=240)
    assert result.returncode == 0, result.stdout[-6000:]
    return home


@pytest.mark.parametrize("game", GAMES)
def test_a_step_plays_scores_and_updates(game: str, folder: Path) -> None:
    """One GRPO step runs 8 episodes without failures and updates the weights.

    Engine and trainer logprobs agree within 1e-4, and each rollout's reward is the sum of its turn
    rewards.
    """
    step, _ = read_metrics(folder / game / "metrics.jsonl")
    assert (step["rollout/completed"] + step["rollout/truncated"], step["rollout/failed"]) == (8, 0)
    assert (
        step["grad_norm"] > 0
        and step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4
        and step["rollout/tool_calls"] == step["rollout/turns"]
    )
    rollouts = [entry.rollout for entry in read_recorded(folder / game / "rollouts" / "step_000000.jsonl")]
    calls = [(turn, turn.tool_call) for rollout in rollouts for turn in rollout.turns]
    assert calls and all(turn.state and call.tool == "move" and call.ran != bool(call.error) for turn, call in calls)
    for rollout in rollouts:
        assert rollout.reward == sum(turn.reward for turn in rollout.turns)
        assert all(turn.reward == -1 for turn in rollout.turns if not turn.tool_call.ran) or game != "ez_points"
        assert all(turn.reward == 0 for turn in rollout.turns if not turn.tool_call.ran) or game != "points24"


@pytest.mark.parametrize("game", GAMES)
def test_the_evaluation_says_the_games_figures(game: str, folder: Path) -> None:
    """The evaluation contains exactly the metrics of the game, and they are consistent with each
    other.
    """
    said = json.loads((folder / game / "eval.json").read_text())
    assert said.keys() == {f"{kind}_{name}" for kind in ("greedy", "sampled") for name in FIGURES | OWN[game]}
    for kind in ("greedy", "sampled"):
        assert said[f"{kind}_failed_fraction"] == 0 and 0 <= said[f"{kind}_success"] <= 1
        if game == "blackjack":
            wins, draws = said[f"{kind}_success"], said[f"{kind}_draws"]
            assert said[f"{kind}_return"] == pytest.approx(wins - (1 - wins - draws))
            assert said[f"{kind}_invalid"] * len(POSITIONS) == pytest.approx(round(said[f"{kind}_invalid"] * len(POSITIONS)))
        if game == "points24":
            assert said[f"{kind}_success_of_solvable"] == said[f"{kind}_success"], "only such hands are dealt here"
