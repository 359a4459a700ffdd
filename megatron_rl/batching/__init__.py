"""Mini-batches, packing into micro-batches and per-token statistics."""
