"""Settings of small runs of a game, for tests that start whole runs."""

GAME_OVERRIDES = (
    "task=number_line", "model.min_pixels=12000", "model.max_pixels=13000", "engine.kv_cache_mib=16", "task.max_turns=2",
    "task.eval_samples=0",
)  # fmt: skip
