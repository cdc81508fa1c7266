"""The clock, the step loop, its clients, and the sampling of tokens."""
