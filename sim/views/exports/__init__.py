"""Results of a run in the formats of other tools: traces, benchmarks, metrics, CSV."""
