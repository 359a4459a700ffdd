"""Generates rollouts: episodes, rendering, rollout engines and the scheduling of prompts."""
