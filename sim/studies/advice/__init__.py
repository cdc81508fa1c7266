"""What would help a run: remedies that fit what binds it, really run."""
