"""What a request costs each node, in seconds: one expression a term, over all nodes at once.

The constants were chosen by replaying public traces.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Loads
from extproc.routing.pace import Pace

DECODE_WEIGHT: Final = 0.25
"""What a second of decoding counts against a second until the first token: the knob between the two."""
QUEUE_WEIGHT: Final = 0.5
BUSIEST: Final = 0.9
"""Past this share of time at prefill, the queueing estimate grows no more."""
PRESSURE_WEIGHT_S: Final = 0.6
LEAST_FREE: Final = 0.01
"""Free share of the KV cache below which a node is as good as full."""


@dataclass(slots=True)
class Ask:
    """A request as the formulas see it. `uncached`: the tokens to prefill, by slot or on every node."""

    prompt_tokens: float
    output_tokens: float
    uncached: Floats | float


@dataclass(slots=True)
class Terms:
    """The cost of a request on every node, and what it is made of; seconds."""

    wait: Floats
    prefill: Floats
    queue: Floats
    pressure: Floats
    decode: Floats
    harm: Floats
    total: Floats


def costs(lane: Lane, loads: Loads, ask: Ask, pace: Pace, now_s: float) -> Terms:
    """Every term on every node; `pace`: the observed over the predicted speeds."""
    uncached, output, context = ask.uncached, ask.output_tokens, ask.prompt_tokens + ask.output_tokens * 0.5
    wait = np.maximum(loads.busy_until_s - now_s, 0.0)
    # Linear in the tokens, plus attention to all that precede them.
    attended = ask.prompt_tokens - uncached * 0.5
    prefill = (lane.square_s * attended + lane.linear_s) * uncached * pace.prefill
    begins = wait + prefill
    queue = _queue_ratio(loads, now_s) * prefill * begins
    fill = (loads.tokens + (ask.prompt_tokens + output)) / lane.room_tokens
    pressure = fill * PRESSURE_WEIGHT_S / np.maximum(1.0 - fill, LEAST_FREE)
    kv_token_s = lane.kv_token_s * pace.decode
    batch, contexts = loads.in_flight, loads.context_tokens + context
    if loads.any_foreign:  # which are taken to be like those that are ours
        contexts = contexts * (1.0 + loads.foreign / (batch + 1.0))
        batch = batch + loads.foreign
    decode = (lane.weights_s * pace.decode + contexts * kv_token_s) * output
    harm = (kv_token_s * (output * context) + prefill) * batch
    total = begins + queue + pressure + (decode + harm) * DECODE_WEIGHT
    return Terms(wait, prefill, queue, pressure, decode, harm, total)


def step_s(lane: Lane, loads: Loads, slot: int) -> float:
    """Seconds that the data sheet has for one token of each request that is on a node now."""
    requests = float(loads.in_flight[slot])
    contexts = (
        float(loads.context_tokens[slot]) / max(requests, 1.0) * (requests + float(loads.foreign[slot]))
    )
    return float(lane.weights_s[slot]) + contexts * float(lane.kv_token_s[slot])


def _queue_ratio(loads: Loads, now_s: float) -> Floats:
    """Seconds that later requests wait, for each second of prefill and second that it takes to be done.

    A node without picks may expect its share of them all the same.
    """
    window_s = loads.window_s(now_s)
    rate = np.maximum(loads.picks, loads.picks_per_node()) * (QUEUE_WEIGHT / window_s)
    return rate / (1.0 - np.minimum(loads.picks_prefill_s * (1.0 / window_s), BUSIEST))
