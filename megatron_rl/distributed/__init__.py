"""Process groups, collectives, image exchange and hang detection."""
