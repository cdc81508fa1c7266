"""What readers share: files, lines, values, order, and what to do with bad ones."""
