"""Figures of studies: plans, validations, traffic, prefixes, swapping."""
