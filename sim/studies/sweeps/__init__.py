"""Many runs: their configurations, their executors, and the dataset of results."""
