"""The simulated engine behind HTTP, in real time."""
