"""Turns this process into one in which vLLM uses an emulated GPU: a pytest plugin, like session.py."""

import tests.support.cuda.session  # noqa: F401 (loads the device)
from tests.support.cuda import vllm_platform

vllm_platform.install()
