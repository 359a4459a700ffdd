"""vLLM parts of the rollout engines: in-process engine, HTTP client and weight transfer."""
