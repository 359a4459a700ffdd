"""launch/train.py without the delay before the other ranks report an error.

Only a rule that does not depend on timing can then prevent duplicate reports.
"""

from megatron_rl.cli import app, cli

app.NON_MAIN_DELAY_S = 0.0
cli()
