"""Entry points: train, evaluate, generate rollouts only, and rescore recorded rollouts."""
