"""KV cache groups of the V1 engine: a manager for each kind of layer, one pool."""
