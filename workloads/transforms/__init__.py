"""Workloads made of others: more of the same, resampled, split, asking otherwise."""
