"""Thousands of exchanges in the queue at once."""

import gc
import tracemalloc

from exchanges import Bench, body_message, chat_body, headers_message, routed

from extproc.exchange import Exchange
from extproc.routing.waiting import Waiter

WAITING = 5_000
BODY = chat_body(padding="x" * 1000)
MOST_BYTES = 4_000
"""What a request may take beside its body while it waits."""


def queued(bench: Bench) -> Exchange:
    exchange = bench.exchange()
    exchange.receive(headers_message(), 0.0)
    exchange.receive(body_message(BODY), 0.0)
    return exchange


def waiters() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(isinstance(one, Waiter) for one in gc.get_objects())


def test_five_thousand_take_bounded_memory_and_those_who_leave_none() -> None:
    before = waiters()
    bench = Bench(("a",), cap=1, max_waiting=WAITING, max_waiting_bytes=WAITING * len(BODY))
    busy = bench.running()
    tracemalloc.start()
    try:
        exchanges = [queued(bench) for _ in range(WAITING)]
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < WAITING * (len(BODY) + MOST_BYTES)
    assert bench.metrics("inferact_queue_depth") == {("5",): WAITING}
    for exchange in exchanges[::2]:
        exchange.end(1.0)
    left = WAITING // 2
    assert (bench.admission.waiting, bench.admission.waiting_bytes) == (left, left * len(BODY))
    assert bench.metrics("inferact_queue_depth") == {("5",): left}
    for exchange in exchanges[1::2]:
        busy.end(2.0)
        routed(exchange.resume(2.0))
        busy = exchange
    busy.end(2.0)
    assert (bench.admission.waiting, bench.admission.waiting_bytes) == (0, 0)
    assert bench.is_idle(2.0)
    exchanges.clear()
    del exchange, busy
    assert waiters() <= before, "those of other tests may be there yet"
