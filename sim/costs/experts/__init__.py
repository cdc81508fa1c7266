"""Routed experts: how many a step touches, their kernels, their exchange of tokens."""
