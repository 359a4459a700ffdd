"""Preflight checks of settings, machine, GPUs, nodes, data and services."""
