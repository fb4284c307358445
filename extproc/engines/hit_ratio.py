"""How often prompts were found in an engine's prefix cache lately, from the engine's own counters."""

from collections import deque
from typing import NamedTuple

from extproc.routing.node import EngineReport

WINDOW_S = 300.0
_STEP_S = 5.0
_SAME_START_S = 1.0


class _Point(NamedTuple):
    """Tokens counted from the first report up to `at_s`, across restarts of the engine."""

    at_s: float
    queries: int
    hits: int


class HitRatio:
    """Prefix hits over queries of one engine within the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()  # the last is the newest there is, the others are thinned out
        self._last: EngineReport | None = None

    def add(self, report: EngineReport) -> None:
        """Count what came since the report before; one without counters says nothing."""
        if report.prefix_queries is None or report.prefix_hits is None:
            return
        points = self._points
        queries, hits = _since(self._last, report)
        if points:
            queries, hits = points[-1].queries + queries, points[-1].hits + hits
        if len(points) > 1 and report.at_s - points[-2].at_s < _STEP_S:
            points.pop()
        points.append(_Point(report.at_s, queries, hits))
        self._last = report

    def value(self, now_s: float) -> float | None:
        """The ratio, 0 to 1; `None` while no prompt was looked up within the window."""
        points, begin_s = self._points, now_s - WINDOW_S
        while len(points) > 1 and points[1].at_s <= begin_s:
            points.popleft()
        if not points or points[-1].at_s <= begin_s:
            return None
        queries = points[-1].queries - points[0].queries
        return min(1.0, (points[-1].hits - points[0].hits) / queries) if queries else None


def _since(before: EngineReport | None, now: EngineReport) -> tuple[int, int]:
    """Queries and hits between two reports; all there are when the engine has started in between."""
    queries, hits = now.prefix_queries or 0, now.prefix_hits or 0
    if before is None:  # counted at times unknown
        return 0, 0
    if restarted(before, now):
        return queries, hits
    return queries - (before.prefix_queries or 0), hits - (before.prefix_hits or 0)


def restarted(before: EngineReport, now: EngineReport) -> bool:
    """Whether the engine has started anew between two reports: its start time moved, or a counter fell."""
    return (
        _moved(before.started_unix_s, now.started_unix_s)
        or _fell(before.prefix_queries, now.prefix_queries)
        or _fell(before.prefix_hits, now.prefix_hits)
    )


def _moved(before_s: float | None, now_s: float | None) -> bool:
    return before_s is not None and now_s is not None and abs(now_s - before_s) > _SAME_START_S


def _fell(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now < before
