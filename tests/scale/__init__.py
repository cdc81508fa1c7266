"""How large runs, sweeps and files may be: memory, and that they end."""
