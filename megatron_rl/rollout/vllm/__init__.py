"""Engine parts that depend on vLLM: in-process engine, HTTP client and weight transfer."""
