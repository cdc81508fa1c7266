"""The configuration of a run: from YAML to typed tables and to objects."""
