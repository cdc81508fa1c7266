"""Malformed input through every door: each is read, or refused in one line."""
