"""GymCards (RL4VLM, arXiv 2405.10292): small games whose state is a picture. Importing this package registers them with gymnasium."""

import gymnasium

gymnasium.register(id="gym_cards/NumberLine-v0", entry_point="megatron_rl.tasks.gym_cards.number_line:NumberLine")
