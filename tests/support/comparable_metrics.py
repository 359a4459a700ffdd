"""Removes the metrics that depend on the machine, so that those of equal runs can be compared."""

MACHINE_PREFIXES = ("time/", "memory/")


def drop_timings(line: dict[str, float]) -> dict[str, float]:
    """Return a line of metrics.jsonl without timings and memory metrics."""
    return {name: value for name, value in line.items() if not name.startswith(MACHINE_PREFIXES)}
