"""KV connectors of the V1 engine: blocks that come from elsewhere, and go there."""
