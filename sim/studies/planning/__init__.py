"""Capacity plans: how much traffic, at what price, and what to change."""
