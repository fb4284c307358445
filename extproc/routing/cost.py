"""What a request costs each node, in seconds: one expression a term, over all nodes at once.

The constants were chosen by replaying public traces. The order of the operations, and what they write to,
is for speed: on arrays this small each one costs a call, whatever it does. So all that is a sum of products
of the request's numbers and the nodes' comes out of one product of matrices.
"""

from enum import IntEnum
from typing import Final

import msgspec
import numpy as np

from extproc.routing import loads as row
from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Loads, Work

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

# Plain numbers: looking up an enum's member takes as long as adding two arrays.
_WAIT, _PREFILL, _QUEUE, _PRESSURE, _DECODE, _HARM = map(int, Term)
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


def costs(lane: Lane, loads: Loads, ask: Ask, now_s: float) -> Costs:
    """Every term on every node."""
    parts: Floats = _weights(ask, now_s).dot(lane.factors * loads.table)
    wait, prefill, queue = parts[_WAIT], parts[_PREFILL], parts[_QUEUE]
    pressure, harm = parts[_PRESSURE], parts[_HARM]
    np.maximum(wait, _ZERO, out=wait)

    if isinstance(uncached := ask.uncached, np.ndarray):
        queue *= uncached
        prefill -= queue
        prefill *= uncached

    np.add(wait, prefill, out=queue)
    queue *= prefill
    queue *= loads.queue_ratio(now_s)

    free = _ONE - pressure
    np.maximum(free, _LEAST_FREE, out=free)
    pressure /= free

    harm += prefill * loads.requests
    return Costs(parts, SCALE.dot(parts))


def _weights(ask: Ask, now_s: float) -> Floats:
    """What each row of the nodes' seconds counts for each part.

    Prefill is linear in the tokens, plus attention to all that precede them. Where nodes hold unlike parts of
    the prompt, that is no sum: there the row of the prefill is that of a token which attends to all of the
    prompt, and the queue's what it gains for each one that is not cached.
    """
    output, need = ask.output_tokens, ask.prompt_tokens + ask.output_tokens
    context = need - output * 0.5
    weights = np.zeros((len(SCALE), row.ROWS))
    weights[_WAIT, row.ONE] = -now_s
    weights[_WAIT, row.BUSY_UNTIL] = 1.0
    if isinstance(ask.uncached, np.ndarray):
        weights[_PREFILL, row.LINEAR] = 1.0
        weights[_PREFILL, row.SQUARE] = ask.prompt_tokens
        weights[_QUEUE, row.SQUARE] = 0.5
    else:
        weights[_PREFILL, row.LINEAR] = ask.uncached
        weights[_PREFILL, row.SQUARE] = ask.uncached * (ask.prompt_tokens - ask.uncached * 0.5)
    weights[_PRESSURE, row.TOKENS] = 1.0
    weights[_PRESSURE, row.ROOM] = need
    weights[_DECODE, row.WEIGHTS] = weights[_DECODE, row.CONTEXTS] = output
    weights[_DECODE, row.OWN_CONTEXT] = weights[_HARM, row.OTHERS] = output * context
    return weights


def prefill_s(lane: Lane, loads: Loads, ask: Ask, slot: int) -> float:
    """Predicted seconds of a request's prefill on one node."""
    uncached = float(ask.uncached[slot]) if isinstance(ask.uncached, np.ndarray) else ask.uncached
    attended = ask.prompt_tokens - uncached * 0.5
    seconds = uncached * (lane.linear_s.item(slot) + lane.square_s.item(slot) * attended)
    return seconds * loads.on[slot].prefill_pace


def step_s(lane: Lane, loads: Loads, slot: int, ended: Work | None = None) -> float:
    """Seconds that the data sheet has for one token of each request on a node.

    These are those booked there now and `ended`, which ran to the last beside them and is booked no more.
    """
    load = loads.on[slot]
    requests, contexts = load.requests, load.context_tokens
    if ended is not None:
        requests, contexts = requests + 1, contexts + ended.context_tokens
    contexts *= 1.0 + load.foreign / max(requests, 1)
    return lane.weights_s.item(slot) + contexts * lane.kv_token_s.item(slot)
