"""``/metrics`` of served engines, under the names of each kind."""
