"""Runs a script in a process with emulated GPUs: `python -m tests.support.cuda SCRIPT ARGUMENTS`."""

import runpy
import sys

import tests.support.cuda.session  # noqa: F401 (loads the device)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
