"""HTTP services of the Lewis game: listener and speaker."""
