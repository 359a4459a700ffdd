"""`python -m vllm.entrypoints.openai.api_server` as a script, so that tests/support/fork_server.py can run it: vLLM is imported already."""

from runpy import run_module

if __name__ == "__main__":
    run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
