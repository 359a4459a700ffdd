"""ALFWorld (arXiv 2010.03768): household tasks in TextWorld.

The policy must find objects, clean, heat or cool them, place them, or look at them under a lamp.
"""
