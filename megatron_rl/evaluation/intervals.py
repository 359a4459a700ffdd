"""How far a share may be off that was counted in a sample."""

import math

Z = 1.959964
"""Of 95%."""


def wilson(share: float, num: int) -> tuple[float, float]:
    """95% interval of a share of `num` independent episodes (Wilson 1927). Example: 8 of 10 -> 0.490 to 0.943."""
    center, spread = share + Z * Z / (2 * num), Z * math.sqrt(share * (1 - share) / num + Z * Z / (4 * num * num))
    return (center - spread) / (1 + Z * Z / num), (center + spread) / (1 + Z * Z / num)
