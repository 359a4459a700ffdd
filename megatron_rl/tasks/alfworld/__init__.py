"""ALFWorld (arXiv 2010.03768): a household in TextWorld, where things are found, cleaned, heated, cooled, lit and put away."""
