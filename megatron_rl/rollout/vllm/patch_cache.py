"""Pictures of requests that vLLM computes anew: after an update of the weights, or where it had no memory left for them."""


def keep_covered_patches() -> None:
    """Let the worker have the patches of all pictures of a request, those too that a cached prefix covers when the request comes.

    vLLM 0.32.0 leaves these out (v1/core/sched/output.py, strip_covered_mm_data) and fails where the prefix is gone when the request goes
    on: it has nothing to encode. Nothing is copied: scheduler and worker share this process.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features
