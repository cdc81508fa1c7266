"""A live page: move a setting, and see what the cache and the latencies do."""
