"""Generation of rollouts: episodes, rendering, prompt scheduling and rollout engines."""
