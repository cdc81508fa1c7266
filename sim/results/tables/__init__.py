"""Result tables in memory and on disk."""
