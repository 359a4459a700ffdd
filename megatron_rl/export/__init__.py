"""What is done with rollouts that are recorded: training once more, other scores, transcripts; and recording without a trainer."""
