"""Routers: each chooses the engine of a request by the rule of one release.

A router is a class with `choose(request)` and `ended(request, place)`
(`sim.engine.engines.Router`), in a file of its own, and knows engines by their place in
the list. What it sees of them it counts itself, or hears of in the way and at the times
of the real one.
"""
