"""Prometheus metrics: events are counted as they happen, the state of the fleet is read at each scrape.

Label values come from the configuration or from a closed set: a name from outside never makes a series.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from extproc import __version__
from extproc.config import CachePolicy
from extproc.openai.errors import ErrorCode
from extproc.openai.usage import Usage
from extproc.routing.admission import Admission
from extproc.routing.node import EventFeed, Health, Node
from extproc.routing.outcome import Ended, LegFailure, Outcome
from extproc.routing.router import Router

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `Telemetry.render` returns."""
OTHER = "other"
"""The label value of whatever is in no configuration and no closed set."""
RETRY_REASONS = frozenset(
    {
        "upstream_connection_failure",
        "upstream_connection_termination",
        "upstream_remote_reset",
        "upstream_request_timeout",
        "upstream_protocol_error",
        "local_reset",
        *("424", "429", "500", "502", "503", "504"),
    }
)
"""Why an attempt fails and the next begins: Envoy's flag where no answer came, else the status."""
_ADMIN_ONLY = frozenset(
    {
        *(ErrorCode.ADMIN_KEY_REQUIRED, ErrorCode.ADMIN_KEY_INVALID, ErrorCode.ADMIN_DISABLED),
        ErrorCode.INVALID_CONFIGURATION,
    }
)
PRIORITIES = range(11)
"""The priorities that a request may have."""

_LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
_DECISION_BUCKETS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class KnowledgeLevel(StrEnum):
    """What the router knows of a node at the moment."""

    HARDWARE = "hardware"  # the data sheet, and our own bookings
    METRICS = "metrics"  # also a fresh report of the engine's
    USAGE = "usage"  # also how many prompt tokens its answers found cached
    EVENTS = "events"  # which blocks its cache holds

    @classmethod
    def of(cls, node: Node, now_s: float) -> "KnowledgeLevel":
        """The level that holds for the node now."""
        if node.events.exact:
            return cls.EVENTS
        if node.usages.ratio(now_s) is not None:
            return cls.USAGE
        return cls.HARDWARE if node.fresh_report(now_s) is None else cls.METRICS


class Source(StrEnum):
    """Where the KV of prompt tokens came from."""

    CACHED = "cached"
    COMPUTED = "computed"
    TRANSFERRED = "transferred"  # from a prefill node
    UNKNOWN = "unknown"  # the engine does not tell


class Telemetry:
    """The metrics of the service, in a registry of their own. `clock` is the router's."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # for the process: no registry can say it
        self.requests_routed = 0
        self._router = router
        self._clock = clock
        self._registry = CollectorRegistry()
        self._served: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._define_counters()
        self._define_timings()
        Info("inferact_build", "The version that runs", registry=self._registry).info(
            {"version": __version__}
        )
        self._registry.register(_Fleet(self, router, admission, clock))

    def _define_counters(self) -> None:
        counter = partial(Counter, namespace="inferact", registry=self._registry)
        self._requests = counter("requests", "Requests routed since scheduler start", ("node", "model"))
        self._ooms = counter("oom_events", "OOM events recovered by the scheduler", ("node",))
        self._retries = counter("retries", "Failed attempts that another node took over", ("node", "reason"))
        self._failopen = counter("failopen_requests", "Requests that Envoy routed without the scheduler")
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of answers, by where their KV came from", ("node", "source")
        )
        self._output_tokens = counter("output_tokens", "Tokens of answers that told their usage", ("node",))
        self._without_usage = counter(
            "streams_without_usage", "Whole streams whose client asked for no usage", ("node",)
        )
        self._legs = counter("prefill_legs", "Prompts sent to a prefill node", ("node",))
        self._leg_failures = counter(
            "prefill_leg_failures", "Prefill legs that came to nothing", ("node", "reason")
        )
        self._went_whole = counter("prefill_fallbacks", "Requests whose prefill leg failed: sent on whole")
        self._by_node = (
            *(self._legs, self._leg_failures),
            *(self._requests, self._ooms, self._retries),
            *(self._prompt_tokens, self._output_tokens, self._without_usage),
        )
        rejections = counter("rejections", "Requests that no engine answered", ("reason",))
        self._rejections = {
            code: rejections.labels(code.value) for code in ErrorCode if code not in _ADMIN_ONLY
        }

    def _define_timings(self) -> None:
        histogram = partial(Histogram, namespace="inferact", registry=self._registry)
        self._latency = histogram(
            "request_latency_seconds", "Request latency histogram", ("node",), buckets=_LATENCY_BUCKETS_S
        )
        self._ttft = histogram(
            "ttft_seconds", "Time to the first token of streams", ("node",), buckets=_TTFT_BUCKETS_S
        )
        self._leg = histogram(
            "prefill_leg_seconds", "Time of good prefill legs", ("node",), buckets=_TTFT_BUCKETS_S
        )
        self._wait = histogram(
            "queue_wait_seconds", "Time that queued requests waited for a node", buckets=_WAIT_BUCKETS_S
        )
        self._decision = histogram(
            "decision_seconds", "Time to read a body and choose a node", buckets=_DECISION_BUCKETS_S
        )
        self._lag = histogram("loop_lag_seconds", "How late the event loop wakes up", buckets=_LAG_BUCKETS_S)

    def served(self, node: Node, model: str, duration_s: float) -> None:
        """The node served a request, over `duration_s` after it came; a model it does not have is `other`."""
        self.requests_routed += 1
        node.requests_total += 1
        node.latencies_s.append(duration_s)
        requests, latency = self._served.get((node.id, model)) or self._series(node, model)
        requests.inc()
        latency.observe(duration_s)

    def answered(self, node: Node, outcome: Outcome, transferred: bool = False) -> None:
        """What the node's answer told of itself; `transferred`: it got the prompt's KV from another."""
        if outcome.ttft_s is not None:
            self._ttft.labels(node.id).observe(outcome.ttft_s)
        if outcome.usage is not None:
            self._output_tokens.labels(node.id).inc(outcome.usage.output_tokens)
            if transferred:
                self._prompt_tokens.labels(node.id, Source.TRANSFERRED).inc(outcome.usage.prompt_tokens)
            else:
                self._prompted(node, outcome.usage)
        elif outcome.ttft_s is not None and outcome.ended is Ended.COMPLETE:
            self._without_usage.labels(node.id).inc()

    def prefill_sent(self, node_id: str) -> None:
        """A prompt goes to a prefill node."""
        self._legs.labels(node_id).inc()

    def prefilled(self, node: Node, seconds: float, usage: Usage | None) -> None:
        """A prefill node has computed a prompt within that time."""
        self._leg.labels(node.id).observe(seconds)
        if usage is not None:
            self._prompted(node, usage)

    def prefill_failed(self, node_id: str, reason: LegFailure) -> None:
        """A prefill leg came to nothing."""
        self._leg_failures.labels(node_id, reason).inc()

    def went_whole(self) -> None:
        """A request goes on without its prefill leg."""
        self._went_whole.inc()

    def _prompted(self, node: Node, usage: Usage) -> None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        if cached is None:
            self._prompt_tokens.labels(node.id, Source.UNKNOWN).inc(prompt)
            return
        node.usages.add(cached, prompt, self._clock())
        self._prompt_tokens.labels(node.id, Source.CACHED).inc(cached)
        self._prompt_tokens.labels(node.id, Source.COMPUTED).inc(prompt - cached)

    def retried(self, node_id: str, reason: str) -> None:
        """An attempt on the node failed and the request went on elsewhere; `reason` as in `RETRY_REASONS`."""
        if self._knows(node_id):
            self._retries.labels(node_id, reason if reason in RETRY_REASONS else OTHER).inc()

    def oom(self, node_id: str) -> None:
        """The node's engine ran out of memory."""
        if self._knows(node_id):
            self._ooms.labels(node_id).inc()

    def rejected(self, code: ErrorCode) -> None:
        """A request got an error that no engine made."""
        self._rejections[code].inc()

    def decided(self, seconds: float) -> None:
        """A node was chosen within that time."""
        self._decision.observe(seconds)

    def queued(self, seconds: float) -> None:
        """A request left the queue after that time."""
        self._wait.observe(seconds)

    def failed_open(self, requests: int = 1) -> None:
        """Envoy routed so many requests by itself."""
        self._failopen.inc(requests)

    def forget(self, node_id: str) -> None:
        """The node has left: its series end."""
        for family in (*self._by_node, self._latency, self._ttft, self._leg):
            family.remove_by_labels({"node": node_id})
        self._served = {key: series for key, series in self._served.items() if key[0] != node_id}

    def loop_lag(self, seconds: float) -> None:
        """The event loop woke up that much late."""
        self._lag.observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format: 0.3 ms a node, so call it in a thread."""
        for node in list(self._router.nodes.values()):  # at zero before the first event: a rate needs both
            self._ooms.labels(node.id)
            self._without_usage.labels(node.id)
            self._output_tokens.labels(node.id)
            for source in Source:
                self._prompt_tokens.labels(node.id, source)
            for model in node.config.serves:
                self._series(node, model)
        return generate_latest(self._registry)

    def _series(self, node: Node, model: str) -> tuple[Counter, Histogram]:
        key = (node.id, model if model in node.config.serves else OTHER)
        if key not in self._served:
            self._served[key] = self._requests.labels(*key), self._latency.labels(node.id)
        return self._served[key]

    def _knows(self, node_id: str) -> bool:
        known = node_id in self._router.nodes
        if not known:
            logger.debug("not counted, because no node has the id %.64r", node_id)
        return known


class _Fleet(Collector):
    """Reads nodes and queue when Prometheus asks; what is unknown has no sample.

    It runs beside the event loop, so it iterates over copies.
    """

    def __init__(
        self, telemetry: Telemetry, router: Router, admission: Admission, clock: Callable[[], float]
    ) -> None:
        self._telemetry = telemetry
        self._router = router
        self._admission = admission
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The gauges as of now."""
        nodes, now_s = list(self._router.nodes.values()), self._clock()
        for name, text, read in _NODE_GAUGES:
            yield _gauge(name, text, ("node",), {(node.id,): read(node, now_s) for node in nodes})
        yield _gauge(
            "node_status",
            "Whether the node is in this state",
            ("node", "status"),
            {(node.id, health): node.health is health for node in nodes for health in Health},
        )
        levels = {node.id: KnowledgeLevel.of(node, now_s) for node in nodes}
        yield _gauge(
            "knowledge_level",
            "Whether this is what routing knows of the node",
            ("node", "level"),
            {(node_id, level): level is held for node_id, held in levels.items() for level in KnowledgeLevel},
        )
        fed = [node for node in nodes if node.config.kv_events is not None]
        for name, text, count in _FEED_COUNTERS:
            family = CounterMetricFamily(f"inferact_{name}", text, labels=("node",))
            for node in fed:
                family.add_metric((node.id,), count(node.events))
            yield family
        yield _gauge(
            "policy_active",
            "Whether this KV cache policy is in force",
            ("policy",),
            {(policy,): policy is self._router.policy.in_force for policy in CachePolicy},
        )
        index = self._router.caches.index
        yield _gauge("prefix_index_blocks", "Prompt blocks that the index knows", (), {(): len(index)})
        yield _gauge(
            "prefix_index_bytes", "About what the index takes of memory", (), {(): index.memory_bytes()}
        )
        waiting = self._admission.waiting_by_priority()
        yield _gauge(
            "queue_depth",
            "Requests that wait for a node",
            ("priority",),
            {(str(priority),): waiting[priority] for priority in PRIORITIES},
        )


def _kv_used_ratio(node: Node, now_s: float) -> float | None:
    report = node.fresh_report(now_s)
    return report.kv_used_ratio if report else None


_NODE_GAUGES: tuple[tuple[str, str, Callable[[Node, float], float | None]], ...] = (
    ("kv_cache_used_ratio", "KV cache utilization (0.0-1.0)", _kv_used_ratio),
    ("prefix_hit_ratio", "Prefix cache hit rate (rolling 5m)", Node.hit_ratio),
    (
        "prediction_error_ratio",
        "Error of predicted cached tokens over prompt tokens (rolling 5m)",
        lambda node, now_s: node.predictions.ratio(now_s),
    ),
    ("node_drained", "Whether the node is drained", lambda node, _: node.drained),
    ("requests_in_flight", "Requests that the scheduler has on the node", lambda node, _: node.in_flight),
    (
        "engine_cap",
        "Requests past which new ones wait, as long as the engine shows that it is full",
        lambda node, _: node.engine_cap,
    ),
)


_FEED_COUNTERS: tuple[tuple[str, str, Callable[[EventFeed], int]], ...] = (
    ("kv_event_messages", "Messages of KV events that were read", lambda feed: feed.messages),
    ("kv_event_gaps", "Places where messages of KV events were missing at first", lambda feed: feed.gaps),
    ("kv_event_errors", "Messages of KV events that could not be read", lambda feed: feed.unreadable),
)


def _gauge(
    name: str, text: str, labels: Sequence[str], samples: Mapping[tuple[str, ...], float | None]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"inferact_{name}", text, labels=labels)
    for values, sample in samples.items():
        if sample is not None:
            family.add_metric(values, sample)
    return family
