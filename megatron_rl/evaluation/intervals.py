"""How far a share may be off that was counted in a sample."""

import math

Z_95 = 1.959964
"""Of 95%."""


def wilson_interval(proportion: float, num: int) -> tuple[float, float]:
    """95% interval of a share of `num` independent episodes (Wilson 1927). Example: 8 of 10 -> 0.490 to 0.943."""
    center, spread = (
        proportion + Z_95 * Z_95 / (2 * num),
        Z_95 * math.sqrt(proportion * (1 - proportion) / num + Z_95 * Z_95 / (4 * num * num)),
    )
    return (center - spread) / (1 + Z_95 * Z_95 / num), (center + spread) / (1 + Z_95 * Z_95 / num)
