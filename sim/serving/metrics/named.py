"""Metrics under the names of an engine, with the labels that all of them carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import CollectorRegistry

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Named:
    """Makes metrics whose names begin alike and whose first labels are the same.

    Attributes
    ----------
    plain
        Those without other labels.
    """

    def __init__(
        self, registry: CollectorRegistry, prefix: str, labels: Sequence[str]
    ) -> None:
        self._registry = registry
        self._prefix = prefix
        self._labels = labels
        self.plain: list[Counter | Gauge | Histogram] = []

    def gauge(self, name: str, text: str, *more: str) -> Gauge:
        return self._made(Gauge, name, text, more)

    def counter(self, name: str, text: str, *more: str) -> Counter:
        return self._made(Counter, name, text, more)

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], *more: str
    ) -> Histogram:
        return self._made(Histogram, name, text, more, buckets=bounds)

    def _made(
        self,
        kind: Callable[..., _Kind],
        name: str,
        text: str,
        more: Sequence[str],
        **options: Any,
    ) -> _Kind:
        labels = (*self._labels, *more)
        metric = kind(
            self._prefix + name, text, labels, registry=self._registry, **options
        )
        if not more:
            self.plain.append(metric)
        return metric
