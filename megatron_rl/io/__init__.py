"""File formats and bounded readers: JSON lines, rollout records, histograms and digests."""
