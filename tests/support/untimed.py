"""What equal runs say alike: their metrics without the clock and the memory of the machine they were on."""

OF_THE_MACHINE = ("time/", "memory/")


def untimed(line: dict[str, float]) -> dict[str, float]:
    """Of one line of metrics.jsonl."""
    return {name: value for name, value in line.items() if not name.startswith(OF_THE_MACHINE)}
