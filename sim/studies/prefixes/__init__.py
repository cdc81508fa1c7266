"""Hits of a prefix cache, for every size of it."""
