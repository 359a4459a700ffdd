"""Keeps the image patches of requests that vLLM recomputes.

vLLM recomputes requests after a weight update, or if it had no memory left for them.
"""


def keep_covered_patches() -> None:
    """Let the worker keep the patches of all images of a request.

    vLLM 0.32.0 drops the images that a cached prefix covers when the request arrives
    (v1/core/sched/output.py, strip_covered_mm_data). It fails if the prefix is gone when the
    request continues, because it has nothing to encode. Nothing is copied: scheduler and worker
    share this process.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features
