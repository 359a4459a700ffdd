"""ALFWorld (arXiv 2010.03768): household tasks in TextWorld.

The agent finds, cleans, heats, cools, lights and places objects.
"""
