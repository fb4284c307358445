"""How many requests an engine runs at once, learned from its queue."""

from typing import Final

from extproc.routing.node import EngineReport

FULL_KV_RATIO: Final = 0.98
"""Above this use of its KV memory an engine is about to make requests wait, or to put running ones off."""
_SHARE: Final = 8
"""An eighth of what runs is let in beyond it: the engine never waits for us. So fast does a cap grow, too."""


def engine_cap(
    cap: int | None, earlier: EngineReport | None, report: EngineReport, foreign: int
) -> int | None:
    """The most requests to have on an engine after its report; `None`: it has room, as far as it shows.

    An engine is full that keeps requests waiting and does not run more: one report alone may have found those
    that came in the middle of a step. Once nobody waits, the cap grows with each report, and is gone when it
    is twice what runs. `foreign` of the engine's requests are not ours.
    """
    running, waiting = report.running, report.waiting or 0
    if running is None:
        return None
    ours = max(1, running - running * foreign // max(1, running + waiting))
    room = ours + max(1, ours // _SHARE)
    is_full = running > 0 and (report.kv_used_ratio or 0.0) >= FULL_KV_RATIO
    if is_full or _is_stuck(earlier, report):
        return room
    if cap is None or (not waiting and cap >= 2 * max(running, 1)):
        return None
    return max(cap, room) if waiting else max(cap, ours) + max(1, cap // _SHARE)


def _is_stuck(earlier: EngineReport | None, report: EngineReport) -> bool:
    """Whether requests wait, as they did before, and no more run than then."""
    if earlier is None or earlier.running is None or report.running is None:
        return False
    return bool(earlier.waiting and report.waiting) and report.running <= earlier.running
