"""Observability: metrics, rollout files, traces, plots and the viewer of runs."""
