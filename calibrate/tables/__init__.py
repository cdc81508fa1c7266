"""Fits as tables for one model: what `sim.costs.measured` looks up."""
