"""How long steps take of which a model prices a part: ahead, in stages, by ranks."""
