"""Requests kept as columns, and those that wait for one another."""
