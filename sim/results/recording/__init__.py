"""The facts of a run, taken down as they come."""
