"""The phases of a plan: questions to workers, in the order in which they follow."""
