"""A node's health as a state machine over its probes, its scrapes and the requests that it got."""

from collections import deque
from enum import Enum, auto
from typing import Final

from extproc.routing.node import Health

METRICS_STALE_S: Final = 10.0
"""Without readable metrics for longer than this, a node is degraded."""
WINDOW_S: Final = 10.0
"""Errors count against a node for so long."""
FEWEST_ERRORS: Final = 5
"""Errors in the window before they can take a node offline; they must also be half of its answers."""
FIRST_REST_S: Final = 2.0
LONGEST_REST_S: Final = 60.0
"""How long a node whose answers took it offline gets no request: each time twice as long as before."""
FLAPPING_S: Final = 300.0
"""How long a node's falls are remembered: each one makes it wait longer to come back."""
CALM_S: Final = 30.0
"""How long after it ran out of memory a node is treated with caution."""
FULL_TRUST: Final = 32
"""A node that came back gets one request at a time, then two, four, up to so many; then there is no limit."""

_FAILURES_OFFLINE: Final = 2
_GOOD_TO_RECOVER: Final = 2
_MOST_TO_RECOVER: Final = 16
_ANSWERS_KEPT: Final = 64


class Event(Enum):
    """What a probe, a scrape or a request brought."""

    PROBE_OK = auto()
    PROBE_FAILED = auto()
    PROBE_REFUSED = auto()
    """Nobody listens there: worth two failures."""
    SCRAPE_OK = auto()
    SCRAPE_FAILED = auto()
    SERVED = auto()
    """A request was answered."""
    FAILED = auto()
    """A request failed here, and another node then served it: so it was not the request's fault."""
    HUNG = auto()
    """A request timed out, and the engine did nothing else in that time."""
    OUT_OF_MEMORY = auto()


class HealthMachine:
    """Health from events; the clock is handed in. Metrics never decide whether a node is offline.

    A node without `has_metrics` is judged by its probes and its requests alone.
    """

    def __init__(self, has_metrics: bool, now_s: float) -> None:
        self._probes = _Probes()
        self._traffic = _Traffic()
        self._falls: deque[float] = deque(maxlen=_ANSWERS_KEPT)
        self._metrics_s = now_s if has_metrics else float("inf")
        self._was_offline = False

    def on(self, event: Event, now_s: float, in_flight: int = 0, works: bool = True) -> Health:
        """Take an event in; the node's health after it.

        `in_flight`: requests that are on the node; `works`: its engine is seen to work on them.
        """
        match event:
            case Event.PROBE_OK:
                self._probes.succeeded()
                if works or not in_flight:  # else they may hang
                    self._traffic.quiet(now_s)
            case Event.PROBE_FAILED:
                self._probes.failed(1)
            case Event.PROBE_REFUSED:
                self._probes.failed(_FAILURES_OFFLINE)
            case Event.SCRAPE_OK:
                self._metrics_s = max(self._metrics_s, now_s)
            case Event.SCRAPE_FAILED:
                pass  # it is the last good scrape's age that counts
            case Event.SERVED:
                self._traffic.served(now_s)
            case Event.FAILED:
                self._traffic.failed(now_s, self._recent_falls(now_s))
            case Event.HUNG:
                self._traffic.rest(now_s, self._recent_falls(now_s), "it hung")
            case Event.OUT_OF_MEMORY:
                self._traffic.ran_out_of_memory(now_s, in_flight)
        return self._health(now_s)

    @property
    def lives(self) -> bool:
        """Whether the probes alone would make the node healthy."""
        return self._probes.live

    @property
    def limit(self) -> int | None:
        """The most requests to have on the node; `None`: no limit."""
        return self._traffic.limit

    @property
    def fault(self) -> str | None:
        """What requests found wrong with the node, while it counts."""
        return self._traffic.fault

    def is_cautious(self, now_s: float) -> bool:
        """Whether the node should get short prompts: it ran out of memory not long ago."""
        return now_s < self._traffic.calm_s

    def is_resting(self, now_s: float) -> bool:
        """Whether it is the node's answers, and not its probes, that keep it offline."""
        return now_s < self._traffic.rest_until_s and not self._probes.dead

    def _health(self, now_s: float) -> Health:
        offline = self._probes.dead or now_s < self._traffic.rest_until_s
        if offline and not self._was_offline:
            self._falls.append(now_s)
            self._traffic.fell()
            if self._probes.dead:
                self._probes.fell(self._recent_falls(now_s))
        self._was_offline = offline
        if offline:
            return Health.OFFLINE
        sound = self.limit is None and not self.is_cautious(now_s)
        if sound and self.lives and now_s - self._metrics_s <= METRICS_STALE_S:
            return Health.HEALTHY
        return Health.DEGRADED

    def _recent_falls(self, now_s: float) -> int:
        return sum(now_s - fell_s <= FLAPPING_S for fell_s in self._falls)


class _Probes:
    """Two failures in a row take a node offline; the oftener it fell, the more successes bring it back."""

    def __init__(self) -> None:
        self._failures = 0
        self._good = 0
        self._good_wanted = 1
        self._dead = False

    @property
    def dead(self) -> bool:
        return self._dead

    @property
    def live(self) -> bool:
        return self._good >= self._good_wanted

    def succeeded(self) -> None:
        self._failures = 0
        self._good += 1
        if self.live or self._good_wanted <= _GOOD_TO_RECOVER:
            self._dead = False

    def failed(self, worth: int) -> None:
        self._failures += worth
        self._good = 0
        self._good_wanted = max(self._good_wanted, _GOOD_TO_RECOVER)
        self._dead = self._dead or self._failures >= _FAILURES_OFFLINE

    def fell(self, falls: int) -> None:
        self._good_wanted = min(_GOOD_TO_RECOVER << falls - 1, _MOST_TO_RECOVER)


class _Traffic:
    """What the requests of a node say of it."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.fault: str | None = None
        self.rest_until_s = float("-inf")
        self.calm_s = float("-inf")
        self._answers: deque[tuple[float, bool]] = deque(maxlen=_ANSWERS_KEPT)

    def served(self, now_s: float) -> None:
        self._answers.append((now_s, True))
        self._trust(now_s)

    def quiet(self, now_s: float) -> None:
        """A second passed in which nothing failed."""
        if self._answers and self._answers[-1][0] < now_s - WINDOW_S:
            self._answers.clear()
        if now_s >= self.rest_until_s:
            self._trust(now_s)

    def failed(self, now_s: float, falls: int) -> None:
        self._answers.append((now_s, False))
        recent = [good for at_s, good in self._answers if now_s - at_s <= WINDOW_S]
        errors = recent.count(False)
        on_trial = self.limit is not None and now_s >= self.calm_s
        if on_trial or (errors >= FEWEST_ERRORS and 2 * errors >= len(recent)):
            self.rest(
                now_s, falls, f"{errors} of its last {len(recent)} answers were errors; others did better"
            )

    def rest(self, now_s: float, falls: int, fault: str) -> None:
        """No requests for some time."""
        if now_s >= self.rest_until_s:
            self.fault = fault
            self.rest_until_s = now_s + min(FIRST_REST_S * 2**falls, LONGEST_REST_S)

    def fell(self) -> None:
        """The node is offline, and will come back to few requests at a time."""
        self.limit = 1
        self._answers.clear()

    def ran_out_of_memory(self, now_s: float, in_flight: int) -> None:
        """Half of what it had was well within its memory, or will be next time."""
        self.fault = "it ran out of memory"
        self.calm_s = now_s + CALM_S
        self.limit = max(1, min(in_flight, self.limit or in_flight) // 2)

    def _trust(self, now_s: float) -> None:
        if self.limit is None or now_s < self.calm_s:
            return
        self.limit *= 2
        if self.limit > FULL_TRUST:
            self.limit = self.fault = None
