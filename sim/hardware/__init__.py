"""GPUs, models, and how many KV blocks fit."""
