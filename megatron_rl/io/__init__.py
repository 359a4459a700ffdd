"""Bounded file readers, JSON Lines files, rollout records, histograms and digests."""
