"""HTTP servers of the Lewis game: listener and speaker."""
