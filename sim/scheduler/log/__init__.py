"""A scheduler's decisions as lines of text, one file a generation."""
