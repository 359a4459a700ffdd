"""Export of recorded rollouts, as SFT transcripts or for RL Logging Board."""
