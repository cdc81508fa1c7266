"""The fast path: the same decisions, without touching decodes that need no attention.

`decodes` is the idea, `v1` the scheduler, `outputs` what the model does, `engine` the
loop. Every one of them equals its stepwise counterpart exactly (invariant 8).
"""
