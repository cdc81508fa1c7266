"""Mistakes of the user's in a workload or a trace file."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A workload that cannot be used: states the rule, the value and the remedy."""


class TraceFormatError(WorkloadError):
    """A trace file that breaks its format: names the file and the line."""


class PlainDataError(WorkloadError):
    """YAML or JSON that cannot be read, or a table in which a key stands twice."""


class WorkloadWarning(UserWarning):
    """Something in a workload that was mended and that the user should know of."""
