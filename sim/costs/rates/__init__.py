"""Shares of a datasheet that kernels and links reach, with their intervals."""
