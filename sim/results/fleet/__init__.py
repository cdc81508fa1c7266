"""Results of several engines: the ranks of one, or a fleet."""
