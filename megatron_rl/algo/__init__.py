"""RL algorithms: advantages, policy and value losses, rollout corrections and filters."""
