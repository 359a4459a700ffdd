"""Launchers: local processes, Slurm jobs and sweeps."""
