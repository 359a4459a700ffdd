"""Confidence intervals for proportions."""

import math

Z_95 = 1.959964
"""Quantile of the standard normal distribution for a two-sided 95% interval."""


def wilson_interval(proportion: float, num: int) -> tuple[float, float]:
    """Return the 95% Wilson confidence interval for a success rate (Wilson 1927).

    `num` is the number of independent episodes. Example: 8 successes in 10 episodes (proportion
    0.8) -> (0.490, 0.943).
    """
    center, spread = (
        proportion + Z_95 * Z_95 / (2 * num),
        Z_95 * math.sqrt(proportion * (1 - proportion) / num + Z_95 * Z_95 / (4 * num * num)),
    )
    return (center - spread) / (1 + Z_95 * Z_95 / num), (center + spread) / (1 + Z_95 * Z_95 / num)
