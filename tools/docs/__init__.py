"""Generated parts of the documentation site (mkdocs.yml)."""
