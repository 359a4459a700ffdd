"""What equal runs say alike: their metrics without the clock and the memory of the machine they were on."""

MACHINE_PREFIXES = ("time/", "memory/")


def drop_timings(line: dict[str, float]) -> dict[str, float]:
    """Of one line of metrics.jsonl."""
    return {name: value for name, value in line.items() if not name.startswith(MACHINE_PREFIXES)}
