"""An attempt of the run of tests/test_stale_run.py that SIGKILL ends at a given place.

    python killed_attempt.py MODEL_FOLDER RUN_FOLDER WHERE STEP

WHERE is rollouts, update, checkpoint or sync.
"""

import sys
from pathlib import Path

from megatron_rl.distributed.world import connect, read_world
from tests.test_stale_run import live, settings_of

if __name__ == "__main__":
    model, folder, where, step = sys.argv[1:]
    connect(read_world(), timeout_s=30)
    live(settings_of(Path(folder), Path(model), max_staleness=1), killed_in=(where, int(step)))
