"""The summary of a run, its verdict, and how both are told."""
