"""What kernels and links reach of a datasheet, and how far off that may be."""
