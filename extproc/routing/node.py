"""A node's live state, and the bookings that requests hold on it."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from extproc.config import NodeConfig
from extproc.hardware import HardwareProfile
from extproc.openai.request import Api
from extproc.routing.loads import Loads, Work
from extproc.routing.window import RatioWindow


class Health(StrEnum):
    """What `/status` says of a node; only offline ones get no traffic."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"


@dataclass(slots=True, frozen=True)
class EngineReport:
    """What an engine said of itself at `at_s` (the router's clock); `None` is unknown, never zero."""

    at_s: float
    running: int | None = None
    waiting: int | None = None
    kv_used_ratio: float | None = None
    kv_capacity_tokens: int | None = None
    prefix_queries: int | None = None  # prompt tokens looked up in the prefix cache since the engine started
    prefix_hits: int | None = None  # those of them that were there
    started_unix_s: float | None = None
    work: int | None = None  # a counter that rises while the engine computes: of tokens, or of steps

    @property
    def requests(self) -> int | None:
        """Requests inside the engine, running or waiting."""
        if self.running is None:
            return None
        return self.running + (self.waiting or 0)


@dataclass(slots=True)
class EventFeed:
    """What became of the engine's KV events."""

    exact: bool = False
    """Whether they tell all that its cache holds."""
    messages: int = 0
    """That were read and in order."""
    gaps: int = 0
    """Places where messages were missing at first."""
    unreadable: int = 0


LATENCIES_KEPT = 1024
"""Request latencies kept for the p99 of `/status`: the latest, whatever their age."""

NO_SLOT = -1
"""The slot of a node that has none yet, or none any more."""
REPORT_FRESH_S = 5.0
"""Age past which a report says nothing: the scrape period (1 s) plus its timeout (4 s)."""


@dataclass(slots=True)
class Node:
    """One inference engine: its configuration, and what is known and booked of it now."""

    config: NodeConfig
    profile: HardwareProfile
    drained: bool = False
    health: Health = Health.DEGRADED  # routable until the first probe has spoken
    limit: int | None = None
    """The most requests to send it while it is not trusted; `None`: as many as there are."""
    engine_cap: int | None = None
    """The most requests that its engine runs at once, as far as it shows; `None`: it has not shown."""
    cautious: bool = False
    """Whether it ran out of memory not long ago."""
    resting: bool = False
    """Whether only its answers to requests, and not its probes, keep it offline."""
    fell_s: float = float("-inf")
    """When it went offline last."""
    last_error: str | None = None
    report: EngineReport | None = None
    earlier_report: EngineReport | None = None  # the one before, unless it was old by then
    worked_s: float = float("-inf")  # when its engine was last seen to compute, or first seen at all
    foreign: int = 0  # requests that others had in the engine at the time of its report
    prefix_hit_ratio: float | None = None  # by the engine's own counters, over the last five minutes
    usages: RatioWindow = field(default_factory=RatioWindow)
    """Prompt tokens of answers that told how many of them were cached, and those."""
    told_cached_s: dict[Api, float] = field(default_factory=dict)
    """When an answer of an API last told how many prompt tokens were cached."""
    predictions: RatioWindow = field(default_factory=RatioWindow)
    """By how many tokens the index was wrong about them."""
    events: EventFeed = field(default_factory=EventFeed)
    slot: int = NO_SLOT
    """Its place in the router's arrays."""
    in_flight: int = 0
    requests_total: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    @property
    def id(self) -> str:
        """The node's identifier in the configuration."""
        return self.config.id

    @property
    def reported_capacity_tokens(self) -> int | None:
        """Its engine's KV capacity, however long ago it told."""
        return self.report.kv_capacity_tokens if self.report else None

    def fresh_report(self, now_s: float) -> EngineReport | None:
        """The engine's last report, unless it is too old to mean anything."""
        report = self.report
        if report is None or now_s - report.at_s > REPORT_FRESH_S:
            return None
        return report

    def hit_ratio(self, now_s: float) -> float | None:
        """Cached share of five minutes' prompt tokens (0-1): by the engine's counters, else by answers."""
        return self.usages.ratio(now_s) if self.prefix_hit_ratio is None else self.prefix_hit_ratio

    def take_report(self, report: EngineReport, ours: int) -> None:
        """Keep the engine's new report; `ours`: how many of the requests in it may be those booked here.

        The two are compared once, here: bookings change at once, a report is seconds old when it is used.
        """
        before = self.report
        if before is None or (report.work, report.kv_used_ratio) != (before.work, before.kv_used_ratio):
            self.worked_s = report.at_s
        self.earlier_report, self.report = self.fresh_report(report.at_s), report
        self.foreign = max(0, (report.requests or 0) - ours)

    def foreign_requests(self, now_s: float) -> int:
        """Requests that others sent to this engine, as of its last report; 0 where it is too old."""
        return self.foreign if self.fresh_report(now_s) else 0

    def p99_latency_s(self) -> float | None:
        """99th percentile (nearest rank) of the latest request latencies; `None` before the first."""
        if not self.latencies_s:
            return None
        ordered = sorted(self.latencies_s)
        return ordered[(99 * len(ordered) - 1) // 100]


class Booking(msgspec.Struct, eq=False):
    """A request's claim on a node, freed exactly once by `release`."""

    node: Node
    work: Work
    loads: Loads
    mark_s: float
    """By which `Loads` finds the prefill of this request again."""
    released: bool = False
    has_begun: bool = False

    def release(self, now_s: float) -> bool:
        """Free the node; `False` when that was done before."""
        if self.released:
            return False
        self.released = True
        self._free(now_s)
        return True

    def move(self, node: Node, work: Work, now_s: float) -> bool:
        """Follow the request to the node that now has it; `False`, and nothing done, after the release."""
        if self.released or node is self.node:
            return False
        self._free(now_s)
        self.node, self.work = node, work
        node.in_flight += 1
        self.mark_s = self.loads.charge(node.slot, work, now_s)
        return True

    def redo(self, work: Work, now_s: float) -> None:
        """The request turns out to be other work to its node; nothing is done after the release."""
        if not self.released:
            self._free(now_s)
            self.work, self.has_begun = work, False
            self.node.in_flight += 1
            self.mark_s = self.loads.charge(self.node.slot, work, now_s)

    def begun(self, at_s: float, now_s: float) -> None:
        """The answer began at `at_s`, now or before, so the prefill is done; only the first word counts."""
        if not (self.released or self.has_begun):
            self.has_begun = True
            self.loads.settle(self.node.slot, self.mark_s, at_s, now_s)

    def _free(self, now_s: float) -> None:
        self.node.in_flight -= 1
        self.loads.free(self.node.slot, self.work, self.mark_s, now_s)


def book(node: Node, loads: Loads, work: Work, now_s: float) -> Booking:
    """Charge a node with a request."""
    node.in_flight += 1
    return Booking(node, work, loads, loads.charge(node.slot, work, now_s))
