"""The paged cache of transformers' continuous batching."""
