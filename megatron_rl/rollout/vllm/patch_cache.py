"""Keeps the image patches of requests that vLLM recomputes.

vLLM recomputes requests after a weight update and after a preemption for lack of memory.
"""


def keep_covered_patches() -> None:
    """Patch vLLM so that its worker keeps the patches of all images of a request.

    When a request arrives, vLLM 0.32.0 drops the images that a cached prefix covers
    (v1/core/sched/output.py, strip_covered_mm_data). If the prefix is no longer cached when the
    request continues, vLLM fails, because it has no patches to encode. No data is copied, because
    the scheduler and the worker share this process.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features  # pyright: ignore[reportPrivateImportUsage]  a deliberate monkeypatch
