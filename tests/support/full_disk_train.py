"""launch/train.py with a limit of 2 MB per file, which simulates a disk that fills up while the
checkpoint of 4.4 MB is written.
"""

import resource
import runpy
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
