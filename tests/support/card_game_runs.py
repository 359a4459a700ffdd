"""Runs one GRPO step in each card game. Run by test_card_runs.py.

    python card_game_runs.py MODEL_FOLDER FOLDER

The second and the third game assign credit to turns by their states (GiGPO).
"""

import sys
from pathlib import Path

from megatron_rl.config import AlgoSettings, BatchSettings, EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.config.task_options import BlackjackOptions, EZPointsOptions, GameOptions, Points24Options
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins

COMMON_OPTIONS = {"reading": "rl4vlm", "eval_art": "classic"}
GAMES: dict[str, tuple[GameOptions, str]] = {
    "ez_points": (EZPointsOptions(invalid="penalize", **COMMON_OPTIONS), "broadcast"),
    "points24": (Points24Options(invalid="noop", train_hands=8, eval_hands=4, solvable=True, **COMMON_OPTIONS), "gigpo"),
    "blackjack": (BlackjackOptions(invalid="random", train_hands=8, eval_drawings=1, **COMMON_OPTIONS), "gigpo"),
}


def make_settings(name: str) -> Settings:
    options, turns = GAMES[name]
    return Settings(
        model=ModelSettings(path=sys.argv[1], min_pixels=12000, max_pixels=13000),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512),
        algo=AlgoSettings(turn_credit=turns, entropy_coef=0.01),
        batch=BatchSettings(prompts_per_step=2, group_size=4),
        task=TaskSettings(name=name, options=options, max_turns=2, max_new_tokens=8, eval_samples=1),
        run=RunSettings(dir=str(Path(sys.argv[2]) / name), steps=1),
    )


if __name__ == "__main__":
    for game in GAMES:
        run(make_settings(game), Plugins())
