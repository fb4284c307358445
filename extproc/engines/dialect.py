"""What an engine calls the things that routing wants to know, and how its answer becomes a report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from extproc.engines.exposition import Sample, read_samples
from extproc.engines.signatures import ANY_ENGINE, Signature
from extproc.routing.node import EngineReport

Names = tuple[str, ...]
"""Metrics that mean the same, newest first: the first one found counts."""

_LARGEST_RATIO = 1.05
"""Rounding may put a full cache just above 1; more is no ratio (a percentage, say)."""


@dataclass(frozen=True, slots=True)
class CapacityLabels:
    """A metric that tells the KV capacity in its labels: in tokens, or in blocks and tokens a block."""

    metric: str
    tokens: str
    blocks: str
    block_tokens: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """An engine's paths and the names of its metrics; without `metrics_path` it is probed only.

    Counters add up over their label sets. So do gauges, but ratios are averaged, and of the samples that
    agree in `rank_label` (workers that report the same requests) only the greatest counts. A gauge with
    `share_label` set is part of a total that is there too.
    """

    engine: str
    health_path: str = "/health"
    metrics_path: str | None = "/metrics"
    metrics_option: str | None = None
    """The engine's command line option without which it has no metrics."""

    version_path: str | None = None
    version_member: str = "version"
    """The member of what is at `version_path` that tells the release."""
    takes_any_model: bool = False
    """Whether it answers to any model's name with the model that it has."""
    usage_option: str | None = None
    """The option without which answers do not tell how much of a prompt was cached."""
    caching_option: str | None = None
    """The option that turns the prefix cache on."""
    kv_events_path: str | None = None
    """Where it tells at which addresses it publishes KV events."""

    running: Names = ()
    waiting: Names = ()
    kv_used_ratio: Names = ()
    kv_used_tokens: Names = ()
    kv_capacity_tokens: Names = ()
    kv_capacity_labels: CapacityLabels | None = None
    rank_label: str | None = None
    share_label: str | None = None

    prefix_queries: Names = ()
    prefix_hits: Names = ()
    prefix_misses: Names = ()
    """For engines that count misses instead of queries."""
    started_unix_s: Names = ()
    work: Names = ()
    """Counters that rise with every step of the engine, not only when a request is over."""

    signatures: tuple[Signature, ...] = ANY_ENGINE
    """How its failing answers are told apart; the first that fits counts."""

    @property
    def names(self) -> Iterator[str]:
        """Every metric to read."""
        yield from self.running + self.waiting
        yield from self.kv_used_ratio + self.kv_used_tokens + self.kv_capacity_tokens
        yield from self.prefix_queries + self.prefix_hits + self.prefix_misses
        yield from self.started_unix_s + self.work
        if self.kv_capacity_labels:
            yield self.kv_capacity_labels.metric


def read_report(dialect: Dialect, text: bytes, at_s: float) -> EngineReport:
    """What an engine's metrics, as Prometheus text, say at `at_s`. Never raises; nonsense is unknown."""
    answer = _Answer(dialect, read_samples(text, dialect.names))
    capacity_tokens = answer.gauge(dialect.kv_capacity_tokens) or answer.capacity_of_labels()
    queries, hits = answer.counter(dialect.prefix_queries), answer.counter(dialect.prefix_hits)
    misses = answer.counter(dialect.prefix_misses)
    if queries is None and hits is not None and misses is not None:
        queries = hits + misses
    started = answer.found(dialect.started_unix_s)
    return EngineReport(
        at_s,
        running=answer.gauge(dialect.running),
        waiting=answer.gauge(dialect.waiting),
        kv_used_ratio=answer.kv_used_ratio(capacity_tokens),
        kv_capacity_tokens=capacity_tokens or None,
        prefix_queries=queries,
        prefix_hits=hits,
        started_unix_s=max((sample.value for sample in started), default=None),
        work=answer.counter(dialect.work),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The samples of one scrape, read in a dialect."""

    dialect: Dialect
    samples: dict[str, list[Sample]]

    def found(self, names: Names) -> list[Sample]:
        return next((self.samples[name] for name in names if name in self.samples), [])

    def counter(self, names: Names) -> int | None:
        return _total(sample.value for sample in self.found(names))

    def gauge(self, names: Names) -> int | None:
        return _total(self._ranks(names))

    def kv_used_ratio(self, capacity_tokens: int | None) -> float | None:
        ranks = self._ranks(self.dialect.kv_used_ratio)
        used_tokens = self.gauge(self.dialect.kv_used_tokens)
        if ranks:
            ratio = sum(ranks) / len(ranks)
        elif used_tokens is not None and capacity_tokens:
            ratio = used_tokens / capacity_tokens
        else:
            return None
        return min(ratio, 1.0) if ratio <= _LARGEST_RATIO else None

    def capacity_of_labels(self) -> int | None:
        labels = self.dialect.kv_capacity_labels
        if labels is None:
            return None
        return _total(
            _number(sample, labels.tokens)
            or _number(sample, labels.blocks) * _number(sample, labels.block_tokens)
            for sample in self.found((labels.metric,))
        )

    def _ranks(self, names: Names) -> list[float]:
        """A gauge's value in each engine rank."""
        ranks: dict[str | int, float] = {}
        for index, sample in enumerate(self.found(names)):
            labels, key = sample.labels, self.dialect.rank_label
            if self.dialect.share_label is None or not labels.get(self.dialect.share_label):
                rank = index if key is None else labels.get(key, "")
                ranks[rank] = max(sample.value, ranks.get(rank, 0.0))
        return list(ranks.values())


def _total(values: Iterable[float]) -> int | None:
    found = list(values)
    return round(sum(found)) if found else None


def _number(sample: Sample, label: str) -> int:
    """A label's number; 0 where it has none (vLLM writes `None`)."""
    text = sample.labels.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
