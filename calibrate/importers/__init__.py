"""Published tables of kernel times, turned into profiles; one source a file."""
