"""Figures of one run, of an engine or of a fleet."""
