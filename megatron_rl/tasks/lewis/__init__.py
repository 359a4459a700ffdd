"""The Lewis game: a speaker describes an image, and a listener identifies it among candidates.

The listener receives only the description and the candidate images.
"""
