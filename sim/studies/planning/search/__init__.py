"""Runs of a plan: a trial at a rate, the numbers of it, and the highest rate."""
