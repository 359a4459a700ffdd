"""Leaves out tests/cuda/emulated in processes without the emulated device;
test_emulated_device.py runs them in a process with it.
"""

import sys

collect_ignore = [] if "tests.support.cuda.session" in sys.modules else ["emulated"]
