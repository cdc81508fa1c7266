"""Figures of several runs: laid over each other, or over the keys of a sweep."""
