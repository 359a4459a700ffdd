"""`python -m vllm.entrypoints.openai.api_server` as a script for tests/support/fork_server.py,
which has already imported vLLM.
"""

from runpy import run_module

if __name__ == "__main__":
    run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
