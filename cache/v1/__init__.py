"""The KV cache of vLLM's V1 engine."""
