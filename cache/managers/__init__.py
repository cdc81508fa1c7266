"""Block managers, one generation a file."""
