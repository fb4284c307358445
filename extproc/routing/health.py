"""A node's health as a state machine over what its probes and scrapes brought."""

from enum import Enum, auto

from extproc.routing.node import Health

METRICS_STALE_S = 10.0
"""Without readable metrics for longer than this, a node is degraded."""
_FAILURES_OFFLINE = 2
_GOOD_TO_RECOVER = 2


class Event(Enum):
    """What one probe or scrape brought."""

    PROBE_OK = auto()
    PROBE_FAILED = auto()
    PROBE_REFUSED = auto()
    """Nobody listens there: worth two failures."""
    SCRAPE_OK = auto()
    SCRAPE_FAILED = auto()


class HealthMachine:
    """Health from events; the clock is handed in. Metrics never decide whether a node is offline.

    A node without `has_metrics` is judged by its probes alone.
    """

    def __init__(self, has_metrics: bool, now_s: float) -> None:
        self._metrics_s = now_s if has_metrics else float("inf")
        self._failures = 0
        self._good = 0
        self._good_wanted = 1

    def on(self, event: Event, now_s: float) -> Health:
        """Take an event in; the node's health after it."""
        match event:
            case Event.PROBE_OK:
                self._failures = 0
                self._good += 1
            case Event.PROBE_FAILED:
                self._failed(1)
            case Event.PROBE_REFUSED:
                self._failed(_FAILURES_OFFLINE)
            case Event.SCRAPE_OK:
                self._metrics_s = max(self._metrics_s, now_s)
            case Event.SCRAPE_FAILED:
                pass  # it is the last good scrape's age that counts
        return self._health(now_s)

    @property
    def lives(self) -> bool:
        """Whether the probes alone would make the node healthy."""
        return self._good >= self._good_wanted

    def _failed(self, worth: int) -> None:
        self._failures += worth
        self._good = 0
        self._good_wanted = _GOOD_TO_RECOVER

    def _health(self, now_s: float) -> Health:
        if self._failures >= _FAILURES_OFFLINE:
            return Health.OFFLINE
        if self.lives and now_s - self._metrics_s <= METRICS_STALE_S:
            return Health.HEALTHY
        return Health.DEGRADED
