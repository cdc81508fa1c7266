"""One run: a configuration in, results out."""
