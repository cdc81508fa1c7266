"""A mutation test of the core: small faults, and whether the tests notice them."""
