"""Tests that the zygote has only one thread when it enters its isolation layers. A fork copies only
one thread, and the kernel refuses a user namespace to a process with several."""

import os
import subprocess
import sys

from megatron_rl_sandbox.zygote_manager import ZYGOTE_ENVIRONMENT

HEAD = "import threading, time\nfrom megatron_rl_sandbox import kernel, zygote\n"


def told(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=True, timeout=60, env=os.environ | ZYGOTE_ENVIRONMENT
    ).stdout


def test_a_thread_that_is_about_to_end_is_waited_for():
    """With a second thread, the kernel refuses a user namespace (22, EINVAL). `list_other_threads`
    waits until this thread has ended."""
    code = """
threading.Thread(target=time.sleep, args=(0.3,)).start()
try:
    kernel.unshare(kernel.CLONE_NEWUSER)
except OSError as error:
    print(error.errno)
print(zygote.list_other_threads())
"""
    assert told(code) == "22\n[]\n"


def test_a_thread_that_stays_is_named():
    code = "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\nprint(len(zygote.list_other_threads()))"
    assert told(code) == "1\n"


def test_nothing_that_is_loaded_keeps_a_thread():
    """The preloaded libraries leave no thread running."""
    assert told("from megatron_rl_sandbox import worker\nworker.preload_libraries()\nprint(zygote.list_other_threads())") == "[]\n"
