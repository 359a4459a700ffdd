"""Web page for the run directories: rollouts, groups, tokens and metrics. It only reads files."""
