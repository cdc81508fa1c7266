"""Faults from outside: signals at any moment, full disks, no home, clocks that jump."""
