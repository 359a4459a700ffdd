"""Exports recorded rollouts as SFT transcripts, or as files for RL Logging Board."""
