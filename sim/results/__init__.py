"""What a run says: its tables, its summary, and both on disk."""
