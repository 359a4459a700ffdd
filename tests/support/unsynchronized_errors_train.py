"""launch/train.py, but a rank does not wait for the main one before it tells an error: only a rule that knows no time keeps it silent."""

from megatron_rl.cli import app, cli

app.NON_MAIN_DELAY_S = 0.0
cli()
