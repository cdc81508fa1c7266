"""The answer of a plan: ``plan.json``, its verdict, configurations and commands."""
