"""Launchers for local processes, Slurm jobs and sweeps."""
