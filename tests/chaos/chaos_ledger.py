"""The ledger of a run: what clients saw, judged by what really happened. Pure.

What a client may rightly see:

* A request is answered by a node that serves its model, with the whole text, the right usage and, of a
  stream, `[DONE]`.
* It is refused (503 with `Retry-After`, or 504; or an engine's own failure, once the fallbacks are used up)
  only if no node that serves the model was well from the request's beginning to its end. A node is not well
  from the moment a fault strikes until it is healed and there was time to notice that (`RECOVERY_S`), nor
  while it is drained. Slow nodes, and nodes without metrics, are well.
* It fails as well if it came to three nodes, as many as a request may, and each broke in that time.
* A stream that has begun ends early, or with an error event, only if its node broke in the meantime.
* While Envoy is restarted, anything that it carries may be cut, and nobody may get through.

All else is an offence: no answer at all though Envoy was up (lost); a refusal though a node was well
(failed); an early end for no reason (truncated); another answer than the right one (garbled); a request
that ran on a node that does not serve its model, or that was sent after a drain was answered and ran on the
drained node (wrong node). So is what is still in flight when all clients are gone, a node that does not
become healthy again, a service or an Envoy that ends by itself, and memory or files of the service that have
grown and stay.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chaos_schedule import Ask, NodePlan
from chaos_timeline import Timeline

_OWN_REFUSALS = (503, 504)
_ENGINE_FAILURES = (424, 429, 500, 503)
_MOST_ATTEMPTS = 3


class End(StrEnum):
    """How a request ended, as its client saw it."""

    WHOLE = "whole"
    """200, and every word of it right."""
    LEFT = "left"
    """The client lost patience, as planned."""
    REFUSED = "refused"
    """Another status than 200."""
    CUT = "cut"
    """200, and not all of the answer; or with an error at its end."""
    GARBLED = "garbled"
    """200, and something else than the right answer."""
    NO_ANSWER = "no answer"


@dataclass(slots=True)
class Exchange:
    """A request and what became of it."""

    ask: Ask
    started_s: float
    ended_s: float = 0.0
    end: End = End.WHOLE
    status: int = 0
    node: str = ""
    attempts: int = 0
    reason: str = ""
    """`x-inferact-reason`: that the router refused, and why."""
    retry_after: bool = False
    trouble: str = ""

    def fail(self, end: End, trouble: str) -> None:
        """It did not end well."""
        self.end, self.trouble = end, trouble


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's head came to a node."""

    node: str
    request_id: str
    at_s: float


class Verdict(StrEnum):
    """Whether the end of a request was right."""

    ANSWERED = "answered"
    LEFT = "left by the client"
    NO_NODE = "refused, as no node was well"
    ALL_BROKE = "failed, as three nodes broke under it"
    NODE_BROKE = "stream cut, as its node broke"
    ENVOY_AWAY = "cut, as Envoy was restarted"
    LOST = "lost"
    FAILED = "failed"
    TRUNCATED = "truncated"
    GARBLED = "garbled"
    WRONG_NODE = "wrong node"
    UNHELPFUL = "refused without Retry-After"


OFFENCES = (
    Verdict.LOST,
    Verdict.FAILED,
    Verdict.TRUNCATED,
    Verdict.GARBLED,
    Verdict.WRONG_NODE,
    Verdict.UNHELPFUL,
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the service holds while nothing is in flight."""

    resident_bytes: int
    files: int


@dataclass(slots=True)
class Remains:
    """What is there when every client is gone and every fault is healed: should be nothing."""

    booked: Mapping[str, int] = field(default_factory=dict)
    """Requests in flight a node, by `/status`."""
    queued: int = 0
    in_engines: Mapping[str, int] = field(default_factory=dict)
    """Requests that came to a node and did not end there, by its own journal."""
    unwell: Sequence[str] = ()
    """Nodes that are not healthy again."""
    crashes: Sequence[str] = ()
    before: Footprint = Footprint(0, 0)
    after: Footprint = Footprint(0, 0)


GROWTH_BYTES = 96 << 20
"""What the index of prompts and freed memory that the allocator keeps may come to."""
GROWTH_FILES = 24
"""Connections that are kept open to nodes and Envoy."""


class Ledger:
    """Takes down every request and arrival, and finds the offences."""

    def __init__(self, fleet: Iterable[NodePlan], timeline: Timeline) -> None:
        self.timeline = timeline
        self.exchanges: list[Exchange] = []
        self.arrivals: list[Arrival] = []
        self.remains = Remains()
        self._models = {node.id: frozenset(node.models) for node in fleet}

    def judge(self, exchange: Exchange) -> Verdict:
        """Whether a request ended as it may."""
        started_s, ended_s = exchange.started_s, exchange.ended_s
        if exchange.end is End.WHOLE:
            return Verdict.ANSWERED
        if exchange.end is End.LEFT:
            return Verdict.LEFT
        if exchange.end is End.GARBLED:
            return Verdict.GARBLED
        if self.timeline.envoy_away(started_s, ended_s):
            return Verdict.ENVOY_AWAY
        if exchange.end is End.NO_ANSWER:
            return Verdict.LOST
        if exchange.end is End.REFUSED:
            return self._judge_refusal(exchange)
        if exchange.ask.stream and self.timeline.broke_streams(exchange.node, started_s, ended_s):
            return Verdict.NODE_BROKE
        return Verdict.TRUNCATED

    def _judge_refusal(self, exchange: Exchange) -> Verdict:
        serving = [node for node, models in self._models.items() if exchange.ask.model in models]
        may_be = _OWN_REFUSALS if exchange.reason else _ENGINE_FAILURES
        if exchange.status not in may_be:
            return Verdict.FAILED
        if self.timeline.any_sound(serving, exchange.started_s, exchange.ended_s):
            return Verdict.ALL_BROKE if self._used_up(exchange) else Verdict.FAILED
        if exchange.reason and exchange.status == 503 and not exchange.retry_after:
            return Verdict.UNHELPFUL
        return Verdict.NO_NODE

    def _used_up(self, exchange: Exchange) -> bool:
        """Whether every node that a request can come to broke while it was on its way."""
        came_to = {arrival.node for arrival in self.arrivals if arrival.request_id == exchange.ask.id}
        between = exchange.started_s, exchange.ended_s
        return len(came_to) == _MOST_ATTEMPTS and all(self.timeline.broke(node, *between) for node in came_to)

    def offences(self) -> Iterator[str]:
        """Every offence against a request, with what was going on."""
        for exchange in self.exchanges:
            verdict = self.judge(exchange)
            if verdict in OFFENCES:
                yield self._told(verdict, exchange)
        for arrival, why in self.wrong_arrivals():
            where = f"{arrival.request_id} came to {arrival.node} at {arrival.at_s:.3f}"
            yield f"{Verdict.WRONG_NODE}: {where}: {why}"

    def wrong_arrivals(self) -> Iterator[tuple[Arrival, str]]:
        """Requests that came to a node that must not have them, and why."""
        exchanges = {exchange.ask.id: exchange for exchange in self.exchanges}
        for arrival in self.arrivals:
            exchange = exchanges.get(arrival.request_id)
            if exchange is None:
                continue  # not over yet
            if exchange.ask.model not in self._models[arrival.node]:
                yield arrival, f"it does not serve {exchange.ask.model}"
            elif drain := self.timeline.drained_since(arrival.node, exchange.started_s, arrival.at_s):
                yield arrival, f"sent at {exchange.started_s:.3f}, drained since {drain.from_s:.3f}"

    def _told(self, verdict: Verdict, exchange: Exchange) -> str:
        ask = exchange.ask
        kind = f"{'stream' if ask.stream else 'whole'} {ask.api} {ask.model} {ask.prompt_bytes} bytes"
        came = [f"{a.node} at {a.at_s:.2f}" for a in self.arrivals if a.request_id == ask.id]
        around = self.timeline.around(exchange.started_s, exchange.ended_s)
        lines = [
            f"{verdict}: {ask.id} ({kind}, {ask.max_tokens} tokens)",
            f"from {exchange.started_s:.2f} to {exchange.ended_s:.2f}: status {exchange.status} "
            f"{exchange.reason} by {exchange.node or 'no node'} after {exchange.attempts} attempts; "
            f"came to {', '.join(came) or 'no node'}",
            exchange.trouble,
            *(f"then: {span}" for span in around),
        ]
        return "\n    ".join(lines)

    def leftovers(self) -> Iterator[str]:
        """What should not be there any more."""
        remains = self.remains
        for where, counts in (("booked on", remains.booked), ("running in", remains.in_engines)):
            yield from (
                f"in flight at the end: {count} {where} {node}" for node, count in counts.items() if count
            )
        if remains.queued:
            yield f"in flight at the end: {remains.queued} in the queue"
        for node in remains.unwell:
            yield f"not healthy at the end: {node}"
        yield from remains.crashes
        if (grown := remains.after.files - remains.before.files) > GROWTH_FILES:
            yield f"the service has {grown} open files more than at first"
        if (grown := remains.after.resident_bytes - remains.before.resident_bytes) > GROWTH_BYTES:
            yield f"the service has {grown / 2**20:.0f} MiB more memory than at first"

    def faults(self) -> list[str]:
        """All that must not be; empty after a good run."""
        return [*self.offences(), *self.leftovers()]

    def __str__(self) -> str:
        verdicts = Counter(self.judge(exchange) for exchange in self.exchanges)
        verdicts[Verdict.WRONG_NODE] = sum(1 for _ in self.wrong_arrivals())
        statuses = Counter(exchange.status or "none" for exchange in self.exchanges)
        again = Counter(exchange.attempts for exchange in self.exchanges if exchange.attempts > 1)
        struck = Counter(span.kind for span in self.timeline.faults)
        remains = self.remains
        rows = [
            ("sent", len(self.exchanges)),
            ("answers by status", _listed(statuses)),
            ("clients behind their plan", self._lateness()),
            ("attempts at nodes", len(self.arrivals)),
            ("retried", f"{again.total()} ({_listed(again, ' attempts')})"),
            *((verdict, verdicts[verdict]) for verdict in Verdict),
            ("in flight at the end", sum(remains.booked.values()) + remains.queued),
            ("in engines at the end", sum(remains.in_engines.values())),
            (
                "service memory",
                _from_to(remains.before.resident_bytes >> 20, remains.after.resident_bytes >> 20, "MiB"),
            ),
            ("service files", _from_to(remains.before.files, remains.after.files, "open")),
            ("faults", _listed(struck)),
        ]
        return "\n".join(f"{name:<30} {value}" for name, value in rows)

    def _lateness(self) -> str:
        """How far clients fell behind: much, where the machine was too slow for so many of them."""
        late_s = sorted(exchange.started_s - exchange.ask.at_s for exchange in self.exchanges) or [0.0]
        return f"median {late_s[len(late_s) // 2]:.1f} s, at most {late_s[-1]:.1f} s"


def _listed(counts: Counter[Any], unit: str = "") -> str:
    return ", ".join(f"{key}{unit}: {counts[key]}" for key in sorted(counts, key=str)) or "none"


def _from_to(before: int, after: int, unit: str) -> str:
    return f"{before} -> {after} {unit}"
