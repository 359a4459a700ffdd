"""Visual search task: read a label that is legible only in a crop of the image."""
