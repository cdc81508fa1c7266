"""Shared parts of readers: files, lines, values, order, and rules for bad ones."""
