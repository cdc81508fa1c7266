"""Predicted against measured: runs of a real engine, simulated and compared."""
