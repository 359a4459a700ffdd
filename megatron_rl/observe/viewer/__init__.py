"""Web page that displays run directories: rollouts, groups, tokens and metrics.

The viewer does not write to run directories.
"""
