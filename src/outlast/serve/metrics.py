"""Figures for Prometheus, in a registry of their own (several servers may live in one process)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PAGE = 4096
_RECOVERY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


def resident_bytes() -> int:
    """Resident set of this process, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Metrics:
    """What the server counts. Gauges are read from their source when Prometheus asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("outlast_requests", "Sequences by how they ended", ["end"], registry=r)
        self.tokens = Counter("outlast_tokens", "Generated tokens given to clients", registry=r)
        self.prompt_tokens = Counter("outlast_prompt_tokens", "Prompt tokens accepted", registry=r)
        self.repeated = Counter("outlast_repeated_tokens", "Tokens reported again after a takeover", registry=r)
        self.contradictions = Counter("outlast_contradictions", "Tokens that contradict sent ones", registry=r)
        self.takeovers = Counter("outlast_takeovers", "Engines replaced while serving", registry=r)
        self.deaths = Counter("outlast_engine_deaths", "Engine processes that ended", ["role"], registry=r)
        self.poisoned = Counter("outlast_poison_requests", "Requests ended for killing engines", registry=r)
        self.recovery = Histogram(
            "outlast_recovery_seconds", "From a death seen to the next token", registry=r, buckets=_RECOVERY_BUCKETS
        )

    def add_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Export what `read` returns as gauges `outlast_NAME` at every scrape."""
        self.registry.register(_Gauges(read))

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"outlast_{name}", name.replace("_", " "), value=value)
