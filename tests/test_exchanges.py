"""Where exchanges are found while they live, and until their log entry comes."""

from exchanges import Bench

from extproc.exchange import Exchange
from extproc.exchanges import ENDED_KEPT, Exchanges


def ended(bench: Bench, exchanges: Exchanges, exchange: Exchange) -> Exchange:
    exchanges.begin(exchange)
    exchanges.end(exchange, 1.0)
    return exchange


def test_one_that_lives_is_found_as_often_as_asked() -> None:
    bench, exchanges = Bench(), Exchanges()
    exchange = bench.running()
    exchanges.begin(exchange)
    assert exchanges.take(exchange.id) is exchanges.take(exchange.id) is exchange


def test_one_that_is_over_is_found_once_and_has_freed_its_node() -> None:
    bench, exchanges = Bench(), Exchanges()
    exchange = ended(bench, exchanges, bench.running())
    assert exchanges.live == {}
    assert bench.in_flight == {}
    assert exchanges.take(exchange.id) is exchange
    assert exchanges.take(exchange.id) is None


def test_one_that_was_sent_nowhere_is_not_kept() -> None:
    bench, exchanges = Bench(("a",), cap=1), Exchanges()
    bench.running()
    for exchange in (bench.exchange(), bench.queued(), bench.sent(model="unknown")):
        assert exchanges.take(ended(bench, exchanges, exchange).id) is None


def test_one_that_left_the_queue_as_its_turn_came_is_not_kept_for_it_has_its_body() -> None:
    bench, exchanges = Bench(("a",), cap=1), Exchanges()
    running, waiting = bench.running(), bench.queued()
    running.end(1.0)
    exchange = ended(bench, exchanges, waiting)
    assert exchange.decision is not None
    assert exchanges.take(exchange.id) is None


def test_the_oldest_are_forgotten() -> None:
    bench, exchanges = Bench(), Exchanges()
    ids = [ended(bench, exchanges, bench.running()).id for _ in range(ENDED_KEPT + 1)]
    assert exchanges.take(ids[0]) is None
    assert all(map(exchanges.take, ids[1:]))
