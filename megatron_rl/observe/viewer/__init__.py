"""Web page that displays run directories: rollouts, groups, tokens and metrics.

It only reads files.
"""
