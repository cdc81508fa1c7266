"""Random numbers by name and position, and the distributions that they go through."""
