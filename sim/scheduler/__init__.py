"""Schedulers, one generation a file."""
