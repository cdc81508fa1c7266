"""The page of a run, several runs, a sweep or a plan."""
