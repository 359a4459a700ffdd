"""Model families: sizes read from config.json, name mappings and rotary positions."""
