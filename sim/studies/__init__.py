"""Many runs, one question: sweeps, plans, validation, conformance, prefixes."""
