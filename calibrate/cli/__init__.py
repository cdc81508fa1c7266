"""The command groups ``kvsim calibrate`` and ``kvsim profile``."""
