"""Output of commands: one file a command."""
