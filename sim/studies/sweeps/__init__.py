"""Many runs: what to run, where to run it, and the dataset that comes of it."""
