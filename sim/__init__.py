"""The clock, the engine, the schedulers, and what is recorded."""
