"""Confidence intervals of proportions."""

import math

Z_95 = 1.959964
"""Quantile of the standard normal distribution for a two-sided 95% interval."""


def wilson_interval(proportion: float, num: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a proportion of `num` independent episodes (Wilson 1927).

    Example: 8 of 10 -> 0.490 to 0.943.
    """
    center, spread = (
        proportion + Z_95 * Z_95 / (2 * num),
        Z_95 * math.sqrt(proportion * (1 - proportion) / num + Z_95 * Z_95 / (4 * num * num)),
    )
    return (center - spread) / (1 + Z_95 * Z_95 / num), (center + spread) / (1 + Z_95 * Z_95 / num)
