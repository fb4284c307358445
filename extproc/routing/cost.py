"""What a request costs each node, in seconds: one expression a term, over all nodes at once.

The terms are explained in docs/routing.md; their constants were chosen by replaying public traces.
"""

from dataclasses import dataclass

import numpy as np

from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Loads

DECODE_WEIGHT = 0.25
"""What a second of decoding counts against a second until the first token: the knob between the two."""
QUEUE_WEIGHT = 0.5
BUSIEST = 0.9
"""Past this share of time at prefill, the queueing estimate grows no more."""
PRESSURE_WEIGHT_S = 0.6
FULL = 0.99
"""KV fill past which a node is as good as full."""


@dataclass(slots=True, frozen=True)
class Ask:
    """A request as the formulas see it. `uncached` has a slot a node: the tokens it must prefill."""

    prompt_tokens: float
    output_tokens: float
    uncached: Floats


@dataclass(slots=True, frozen=True)
class Terms:
    """The cost of a request on every node, and what it is made of; seconds."""

    wait: Floats
    prefill: Floats
    queue: Floats
    pressure: Floats
    decode: Floats
    harm: Floats
    total: Floats


def prefill_s(lane: Lane, ask: Ask, speed: Floats) -> Floats:
    """Seconds of prefill: linear in the tokens, plus attention to all that precede them."""
    uncached = ask.uncached
    attended = ask.prompt_tokens - uncached * 0.5
    return uncached * (lane.linear_flop + lane.square_flop * attended) * lane.flop_s * speed


def costs(lane: Lane, loads: Loads, ask: Ask, room: Floats, pace: "Pace", now_s: float) -> Terms:
    """Every term on every node.

    `room` is the KV capacity in tokens (0: unknown), `pace` the observed over the predicted speeds.
    """
    prompt, output = ask.prompt_tokens, ask.output_tokens
    batch = loads.in_flight + loads.foreign
    others = np.maximum(loads.in_flight, 1.0)
    context = (loads.prompt_tokens + loads.output_tokens * 0.5) / others
    wait = loads.wait_s(now_s)
    prefill = prefill_s(lane, ask, pace.prefill)
    rate, busy = loads.arrivals(now_s)
    queue = QUEUE_WEIGHT * rate / (1.0 - np.minimum(busy, BUSIEST)) * prefill * (wait + prefill)
    fill = (loads.prompt_tokens + loads.output_tokens + (prompt + output)) / room
    pressure = np.where(
        fill < FULL, fill / np.maximum(1.0 - fill, 1.0 - FULL), FULL / (1.0 - FULL) * (1.0 + fill)
    )
    pressure *= PRESSURE_WEIGHT_S
    kv_token_s = lane.kv_token_s * pace.decode
    context = np.where(loads.in_flight > 0, context, prompt + output * 0.5)
    decode = output * (lane.weights_s * pace.decode + (batch + 1.0) * context * kv_token_s)
    harm = batch * (prefill + output * (prompt + output * 0.5) * kv_token_s)
    total = wait + prefill + queue + pressure + DECODE_WEIGHT * (decode + harm)
    return Terms(wait, prefill, queue, pressure, decode, harm, total)
