"""How much traffic a fleet can take, so that loads mean the same on every fleet."""

from collections.abc import Callable, Sequence

from extproc.config import NodeConfig
from extproc.simulator.replay.fleet import make_fleet
from extproc.simulator.replay.loop import ENOUGH_REQUESTS, LATE_RATIO, replay
from extproc.simulator.replay.picking import PickerFactory
from extproc.simulator.replay.traces import TraceError, TraceRequest, rate, scaled

_CLOSE = 1.02  # ratio of the bounds at which the search ends


def saturation_rate(
    requests: Sequence[TraceRequest], nodes: Sequence[NodeConfig], make_picker: PickerFactory, seed: int
) -> float:
    """Requests a second that saturate the fleet under this picker. Raises `TraceError`: too few requests."""
    if len(requests) < ENOUGH_REQUESTS:
        raise TraceError(
            f"finding a load takes at least {ENOUGH_REQUESTS} requests; "
            f"this part of the trace has {len(requests)}."
        )

    def saturated(factor: float) -> bool:
        fleet = make_fleet(nodes, seed)
        picker = make_picker(fleet.nodes, seed)
        return replay(scaled(requests, factor), fleet, picker, seed).late_ratio > LATE_RATIO

    return rate(requests) * _boundary(saturated)


def _boundary(holds: Callable[[float], bool]) -> float:
    """The factor, to 2 %, from which on `holds`; it must hold for large factors and not for small ones."""
    low = high = 1.0
    if holds(1.0):
        while holds(low := low / 2):
            high = low
    else:
        while not holds(high := high * 2):
            low = high
    while high / low > _CLOSE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low
