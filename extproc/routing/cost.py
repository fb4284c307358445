"""What a request costs each node, in seconds: one expression a term, over all nodes at once.

The constants were chosen by replaying public traces. The order of the operations, and what they write to,
is for speed: on arrays this small each one costs a call, whatever it does.
"""

from enum import IntEnum
from typing import Final

import msgspec
import numpy as np

from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Loads, Work
from extproc.routing.pace import Pace

DECODE_WEIGHT: Final = 0.25
"""What a second of decoding counts against a second until the first token: the knob between the two."""
PRESSURE_WEIGHT_S: Final = 0.6
LEAST_FREE: Final = 0.01
"""Free share of the KV cache below which a node is as good as full."""


class Term(IntEnum):
    """What a cost is made of, as rows of `Costs.parts`."""

    WAIT = 0
    """Until the prefill work booked before is done."""
    PREFILL = 1
    """The tokens that the node does not hold."""
    QUEUE = 2
    """What those who come later wait for this prefill."""
    PRESSURE = 3
    """The KV memory that it fills."""
    DECODE = 4
    """The answer's tokens."""
    HARM = 5
    """What it slows down those that decode there."""


SCALE: Final[Floats] = np.array([1.0, 1.0, 1.0, PRESSURE_WEIGHT_S, DECODE_WEIGHT, DECODE_WEIGHT])
"""What each part counts, by `Term`."""


# Arrays without dimensions: numpy takes twice as long to make one of a number.
_ZERO: Final[Floats] = np.array(0.0)
_ONE: Final[Floats] = np.array(1.0)
_LEAST_FREE: Final[Floats] = np.array(LEAST_FREE)


class Ask(msgspec.Struct):
    """A request as the formulas see it. `uncached`: the tokens to prefill, by slot or on every node."""

    prompt_tokens: float
    output_tokens: float
    uncached: Floats | float


class Costs(msgspec.Struct):
    """The seconds that a request costs every node; `parts`: a row a `Term`, whose scaled sum `total` is."""

    parts: Floats
    total: Floats


def costs(lane: Lane, loads: Loads, ask: Ask, pace: Pace, now_s: float) -> Costs:
    """Every term on every node; `pace`: the observed over the predicted speeds."""
    output, need = ask.output_tokens, ask.prompt_tokens + ask.output_tokens
    context = need - output * 0.5
    parts = np.empty((len(SCALE), loads.size))
    wait, prefill, queue, pressure, decode, harm = parts
    np.subtract(loads.busy_until_s, now_s, out=wait)
    np.maximum(wait, _ZERO, out=wait)

    _prefill(lane, ask, out=prefill)
    prefill *= pace.prefill

    np.add(wait, prefill, out=queue)
    queue *= prefill
    queue *= loads.queue_ratio(now_s)

    np.add(loads.tokens, need, out=pressure)
    pressure /= lane.room_tokens
    free = np.maximum(_ONE - pressure, _LEAST_FREE)
    pressure /= free

    batch, contexts = loads.in_flight, loads.context_tokens + context
    if loads.any_foreign:  # which are taken to be like those that are ours
        contexts *= 1.0 + loads.foreign / (batch + 1.0)
        batch = batch + loads.foreign
    paced = pace.decode * output
    kv_s = lane.kv_token_s * paced
    paced *= lane.weights_s
    np.multiply(contexts, kv_s, out=decode)
    decode += paced

    np.multiply(kv_s, context, out=harm)
    harm += prefill
    harm *= batch
    return Costs(parts, SCALE.dot(parts))


def prefill_s(lane: Lane, ask: Ask, pace: Pace, slot: int) -> float:
    """Predicted seconds of a request's prefill on one node."""
    out = np.empty(len(lane.linear_s))
    _prefill(lane, ask, out)
    return float(out[slot] * pace.prefill[slot])


def step_s(lane: Lane, loads: Loads, slot: int, ended: Work | None = None) -> float:
    """Seconds that the data sheet has for one token of each request on a node.

    These are those booked there now and `ended`, which ran to the last beside them and is booked no more.
    """
    requests, contexts = loads.in_flight.item(slot), loads.context_tokens.item(slot)
    if ended is not None:
        requests, contexts = requests + 1.0, contexts + ended.context_tokens
    contexts *= 1.0 + loads.foreign.item(slot) / max(requests, 1.0)
    return lane.weights_s.item(slot) + contexts * lane.kv_token_s.item(slot)


def _prefill(lane: Lane, ask: Ask, out: Floats) -> None:
    """As the data sheet has it: linear in the tokens, plus attention to all that precede them."""
    uncached = ask.uncached
    attended = ask.prompt_tokens - uncached * 0.5
    np.multiply(lane.square_s, attended, out=out)
    out += lane.linear_s
    out *= uncached
