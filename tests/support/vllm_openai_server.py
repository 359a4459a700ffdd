"""`python -m vllm.entrypoints.openai.api_server` as a script for tests/support/fork_server.py,
which has already imported vLLM.

On a CPU, vLLM starts an interpreter for the engine's process. Here, this process is forked.
"""

import multiprocessing
from runpy import run_module

from vllm.v1.engine import utils


def main() -> None:
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
