"""Block manager v2 of vLLM's V0 engine, and its allocators."""
