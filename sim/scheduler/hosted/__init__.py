"""The scheduler of an installed vLLM, run without a GPU."""
