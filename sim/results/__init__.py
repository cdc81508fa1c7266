"""Results of a run: its tables, its summary, and both on disk."""
