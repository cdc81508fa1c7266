"""A live page: move a setting, and see the cache and the latencies follow."""
