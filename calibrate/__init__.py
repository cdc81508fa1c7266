"""Kernel timing on a GPU; writes the profiles that `sim` reads."""
