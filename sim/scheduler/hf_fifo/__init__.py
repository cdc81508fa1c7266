"""The continuous batching of transformers 5.17."""
