"""Notebooks that teach, one question each; `build` makes them of their sources."""
