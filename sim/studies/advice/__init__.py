"""Advice on a run: remedies for the resource that binds it, each really run."""
