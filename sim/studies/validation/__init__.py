"""Predicted against measured: what a real engine did, simulated and compared."""
