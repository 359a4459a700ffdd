"""GymCards (RL4VLM, arXiv 2405.10292): small games with image observations.

Importing this package registers the games with gymnasium.
"""

import gymnasium

gymnasium.register(id="gym_cards/NumberLine-v0", entry_point="megatron_rl.tasks.gym_cards.number_line:NumberLine")
gymnasium.register(id="gym_cards/EZPoints-v0", entry_point="megatron_rl.tasks.gym_cards.points:EZPoints", max_episode_steps=300)
gymnasium.register(id="gym_cards/Points24-v0", entry_point="megatron_rl.tasks.gym_cards.points:Points24", max_episode_steps=300)
gymnasium.register(id="gym_cards/Blackjack-v0", entry_point="megatron_rl.tasks.gym_cards.blackjack:Blackjack", max_episode_steps=300)
