"""What a prefix cache would find, for every size of it."""
