"""How many requests an engine runs at once, learned from its queue."""

from typing import Final

from extproc.routing.node import EngineReport

FULL_KV_RATIO: Final = 0.98
"""Above this use of its KV memory an engine is about to make requests wait, or to put running ones off."""
_GROWTH: Final = 8


def engine_cap(cap: int | None, report: EngineReport, foreign: int) -> int | None:
    """The most requests to have on an engine after its report; `None`: it has room.

    An engine that lets requests wait runs as many as it can. Once nobody waits, the cap grows by an eighth
    with each report, and is gone when it is twice what runs. `foreign` requests are not ours to cap.
    """
    running, waiting, used = report.running, report.waiting, report.kv_used_ratio
    if running is None:
        return None
    if waiting or (used is not None and used >= FULL_KV_RATIO):
        ours = max(1, running - foreign)
        return ours if cap is None else min(cap, ours)
    if cap is None or cap >= 2 * max(running, 1):
        return None
    return cap + max(1, cap // _GROWTH)
