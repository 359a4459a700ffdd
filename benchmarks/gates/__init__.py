"""Learning gates: bands for figures of small recipes, from a history of earlier runs."""
