"""Registers puzzles/Sokoban-v0 and puzzles/FrozenLake-v0, with the rewards of VAGEN."""

import gymnasium

_PACKAGE = __name__.rpartition(".")[0]

gymnasium.register(id="puzzles/Sokoban-v0", entry_point=f"{_PACKAGE}.sokoban:Sokoban", max_episode_steps=100)
gymnasium.register(id="puzzles/FrozenLake-v0", entry_point=f"{_PACKAGE}.frozen_lake:FrozenLake", max_episode_steps=100)
