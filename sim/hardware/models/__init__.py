"""Transformer models: their shapes, weights and bundled ``config.json`` files."""
