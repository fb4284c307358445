"""An exchange in time: the queue, deadlines, failed attempts, and its end, however it comes."""

import contextlib
import itertools
from typing import Any

import pytest
from exchanges import (
    ANSWER_MESSAGES,
    CHAT,
    TIMEOUT_S,
    Bench,
    body_message,
    chat_body,
    headers_message,
    opened,
    refused,
    reply_of,
    routed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.exchange import Exchange, Phase, ProtocolError
from extproc.replies import HOLD_MARGIN_S
from extproc.routing.node import Health
from extproc.routing.patience import STREAM_RATIO


def test_a_request_that_cannot_be_changed_gives_its_slot_to_the_next() -> None:
    bench = Bench(("a",), cap=1, settings={"model_aliases": {"public": "engine"}})
    busy = bench.running()
    members = {f"m{number}": 0 for number in range(300)}
    refused_one, following = bench.queued(model="public", **members), bench.queued(now_s=1.0)
    busy.end(2.0)
    refused_reply = reply_of(refused_one.resume(2.0) or b"")
    assert refused_reply.immediate_response.status.code == 400
    assert following.resume(2.0) is None
    refused_one.end(2.1)
    assert following.resume(2.1) is not None
    following.end(3.0)
    assert bench.in_flight == {}


class TestTheQueue:
    def test_makes_envoy_wait_two_seconds_longer_than_we_do(self) -> None:
        bench = Bench(("a",), cap=1)
        bench.running()
        exchange = bench.exchange()
        exchange.receive(headers_message(), 100.0)
        reply = reply_of(exchange.receive(body_message(chat_body()), 107.0))
        assert reply.WhichOneof("response") is None
        override_s = reply.override_message_timeout.ToNanoseconds() / 1e9
        assert 107.0 + override_s == exchange.deadline_s + HOLD_MARGIN_S
        assert HOLD_MARGIN_S == 2.0

    def test_holds_no_request_longer_than_envoy_can(self) -> None:
        """Envoy ignores an override of more than an hour, and would fail open after its usual 2 s."""
        bench = Bench(("a",), cap=1)
        busy = bench.running()
        exchanges = [bench.exchange(timeout_s=7200.0) for _ in range(2)]
        for exchange in exchanges:
            exchange.receive(headers_message(), 0.0)
            reply = reply_of(exchange.receive(body_message(chat_body()), 0.0))
            assert reply.override_message_timeout.ToSeconds() == 3600
        busy.end(3000.0)
        values, _ = routed(exchanges[0].resume(3000.0))
        assert values["x-envoy-upstream-rq-timeout-ms"] == "4200000", "its answer has all of its time"
        assert exchanges[1].resume(3597.9) is None
        assert refused(exchanges[1].resume(3598.0))[:2] == (504, "request_timeout")

    def test_gives_no_reply_until_a_node_is_free(self) -> None:
        bench = Bench(("a",), cap=1)
        busy, exchange = bench.running(), bench.queued(now_s=1.0)
        woken: list[float] = []
        exchange.wake = lambda: woken.append(9.0)
        assert exchange.resume(2.0) is None
        busy.end(9.0)
        assert woken == [9.0]
        values, _ = routed(exchange.resume(9.0))
        assert values["x-inferact-cluster"] == "a"
        assert values["x-envoy-upstream-rq-timeout-ms"] == "22000", "what is left of the 30 s"
        assert bench.metrics("inferact_queue_wait_seconds_sum") == {(): 8.0}
        assert bench.in_flight == {"a": 1}

    def test_answers_504_at_the_deadline(self) -> None:
        bench = Bench(("a",), cap=1)
        busy, exchange = bench.running(), bench.queued(now_s=1.0)
        assert exchange.resume(1.0 + TIMEOUT_S - 0.001) is None
        assert refused(exchange.resume(1.0 + TIMEOUT_S))[:2] == (504, "request_timeout")
        assert exchange.resume(1.0 + TIMEOUT_S) is None, "answered once"
        assert bench.admission.waiting == 0
        assert bench.metrics("inferact_rejections_total") == {("request_timeout",): 1}
        busy.end(40.0)
        exchange.end(40.0)
        assert bench.in_flight == {}

    def test_answers_504_while_an_answer_could_not_be_there_in_time_any_more(self) -> None:
        bench = Bench(("a",), cap=1)
        for stream, seconds in [(False, 8.0)] * 10 + [(True, 25.0)]:
            answered = bench.running(stream=stream)
            answered.answered(seconds)
            answered.end(seconds)
        bench.running().end(0.1)  # the client left: that is not how long an answer takes
        bench.running()
        exchange, streaming = bench.queued(now_s=1.0), bench.queued(now_s=1.0, stream=True)
        assert exchange.resume(22.9) is None
        assert refused(exchange.resume(23.0))[:2] == (504, "request_timeout")
        latest_s = 1.0 + TIMEOUT_S * STREAM_RATIO
        assert streaming.resume(latest_s - 0.1) is None, "a stream must only begin in time"
        assert refused(streaming.resume(latest_s))[0] == 504

    def test_counts_the_time_from_when_the_whole_request_is_here(self) -> None:
        """A big body over a slow line is no reason to give up before an engine has seen it."""
        bench = Bench(("a",), cap=1)
        exchange = bench.exchange()
        exchange.receive(headers_message(), 0.0)
        values, _ = routed(exchange.receive(body_message(chat_body()), 100.0))
        assert values["x-envoy-upstream-rq-timeout-ms"] == "30000"
        queued = bench.exchange()
        queued.receive(headers_message(), 0.0)
        queued.receive(body_message(chat_body()), 100.0)
        assert queued.resume(129.0) is None

    def test_answers_503_when_the_nodes_go_away(self) -> None:
        bench = Bench(("a",), cap=1)
        bench.running()
        exchange = bench.queued()
        bench.nodes["a"].health = Health.OFFLINE
        bench.admission.freed(3.0)
        assert refused(exchange.resume(3.0))[:2] == (503, "no_available_node")
        assert bench.metrics("inferact_queue_wait_seconds_count") == {(): 1}

    def test_is_left_when_the_client_goes_away(self) -> None:
        bench = Bench(("a",), cap=1)
        busy, gone, staying = bench.running(), bench.queued(), bench.queued()
        gone.end(1.0)
        assert bench.admission.waiting == 1
        busy.end(2.0)
        routed(staying.resume(2.0))
        assert gone.resume(2.0) is None
        assert gone.decision is None

    def test_gives_a_slot_back_that_came_as_the_client_went(self) -> None:
        bench = Bench(("a",), cap=1)
        busy, gone, staying = bench.running(), bench.queued(), bench.queued()
        busy.end(1.0)
        assert staying.resume(1.0) is None, "the slot is the other's"
        gone.end(1.0)
        routed(staying.resume(1.0))
        assert bench.in_flight == {"a": 1}
        staying.end(2.0)
        assert bench.in_flight == {}

    def test_lets_a_slot_that_came_just_in_time_be_used(self) -> None:
        bench = Bench(("a",), cap=1)
        busy, exchange = bench.running(), bench.queued()
        busy.end(TIMEOUT_S)
        values, _ = routed(exchange.resume(TIMEOUT_S + 1))
        assert values["x-envoy-upstream-rq-timeout-ms"] == "1", "0 would mean for ever"

    def test_is_no_matter_of_an_exchange_that_is_not_in_it(self) -> None:
        bench = Bench()
        for exchange in (bench.exchange(), opened(bench), bench.running()):
            assert exchange.resume(99.0) is None


class TestTimeouts:
    """A stream must begin within its time, but is never cut; any other answer must be complete."""

    @pytest.mark.parametrize(
        ("names", "share_ms"), [(("a",), "30000"), (("a", "b"), "15000"), (("a", "b", "c"), "10000")]
    )
    def test_of_a_stream_are_a_share_for_each_attempt(self, names: tuple[str, ...], share_ms: str) -> None:
        values, _ = routed(opened(Bench(names)).receive(body_message(chat_body(stream=True)), 0.0))
        assert values["x-envoy-upstream-rq-per-try-timeout-ms"] == share_ms
        assert "x-envoy-upstream-rq-timeout-ms" not in values

    def test_of_another_answer_are_one_for_all_attempts(self) -> None:
        values, _ = routed(opened(Bench()).receive(body_message(chat_body(stream=False)), 0.0))
        assert values["x-envoy-upstream-rq-timeout-ms"] == "30000"
        assert "x-envoy-upstream-rq-per-try-timeout-ms" not in values

    def test_of_a_stream_are_shares_of_what_the_queue_has_left(self) -> None:
        bench = Bench(("a", "b"), cap=1)
        busy = [bench.running(), bench.running()]
        exchange = bench.queued(stream=True)
        busy[0].end(10.0)
        values, _ = routed(exchange.resume(10.0))
        assert values["x-inferact-retry-1"] == "b", "full, but better than none"
        assert values["x-envoy-upstream-rq-per-try-timeout-ms"] == "10000"

    def test_are_whole_milliseconds_and_never_zero(self) -> None:
        exchange = Bench().exchange(timeout_s=0.001)
        exchange.receive(headers_message(), 0.0)
        values, _ = routed(exchange.receive(body_message(chat_body(stream=True)), 0.0))
        assert values["x-envoy-upstream-rq-per-try-timeout-ms"] == "1"


class TestTheEnd:
    def test_frees_the_node(self) -> None:
        bench = Bench()
        bench.running().end(1.0)
        assert bench.in_flight == {}
        assert bench.is_idle(1.0)

    def test_counts_once_however_often_it_comes(self) -> None:
        bench = Bench(("a",))
        exchange, other = bench.running(), bench.running()
        exchange.end(1.0)
        exchange.end(1.0)
        assert bench.in_flight == {"a": 1}
        other.end(1.0)
        assert bench.in_flight == {}

    def test_may_come_before_anything_else(self) -> None:
        bench = Bench()
        for exchange in (bench.exchange(), opened(bench)):
            exchange.end(0.0)
            assert exchange.phase is Phase.OVER

    def test_frees_the_node_that_has_the_request_by_then(self) -> None:
        bench = Bench()
        exchange = bench.running()
        exchange.attempt_failed("a", 1.0)
        assert bench.in_flight == {"b": 1}
        exchange.end(2.0)
        assert bench.in_flight == {}


class TestAFailedAttempt:
    def test_gives_the_slot_to_one_who_waits(self) -> None:
        bench = Bench(("a", "b"), cap=1)
        exchange, other = bench.running(), bench.running()
        assert exchange.decision is not None
        assert [node.id for node in exchange.decision.fallbacks] == ["b"]
        waiting = bench.queued()
        exchange.attempt_failed("a", 1.0)
        values, _ = routed(waiting.resume(1.0))
        assert values["x-inferact-cluster"] == "a"
        for each in (exchange, other, waiting):
            each.end(2.0)
        assert bench.in_flight == {}

    def test_is_no_matter_of_an_exchange_without_a_decision(self) -> None:
        bench = Bench(("a",), cap=1)
        running = bench.running()
        for exchange in (bench.exchange(), opened(bench), bench.queued()):
            exchange.attempt_failed("a", 1.0)
        assert bench.in_flight == {"a": 1}
        running.end(1.0)
        running.attempt_failed("a", 2.0)


BODIES = st.sampled_from(
    [
        chat_body(),
        chat_body(stream=True),
        chat_body(**{"x-inferact": {"node_affinity": "b", "priority": 9}}),
        chat_body(model="unheard-of"),
        b"",
        b"{",
    ]
) | st.binary(max_size=40)
MESSAGES = (
    st.builds(headers_message, st.sampled_from([CHAT, "/v1/completions", "/nowhere"]), st.booleans())
    | st.builds(body_message, BODIES)
    | st.sampled_from(list(ANSWER_MESSAGES.values()))
    | st.binary(max_size=30)
)
ACTIONS = st.tuples(st.just("receive"), MESSAGES) | st.sampled_from(
    [("resume", b""), ("end", b""), ("fail", b"a"), ("fail", b"b"), ("offline", b"a"), ("back", b"a")]
)


def act(bench: Bench, exchange: Exchange, action: str, data: bytes, now_s: float) -> bytes | None:
    """Let one thing happen."""
    match action:
        case "receive":
            with contextlib.suppress(ProtocolError):
                return exchange.receive(data, now_s)
        case "resume":
            return exchange.resume(now_s)
        case "end":
            exchange.end(now_s)
        case "fail":
            exchange.attempt_failed(data.decode(), now_s)
        case _:
            bench.nodes[data.decode()].health = Health.OFFLINE if action == "offline" else Health.HEALTHY
            bench.admission.freed(now_s)
    return None


@settings(max_examples=300, deadline=None)
@given(
    openings=st.lists(BODIES, min_size=3, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), ACTIONS, st.floats(0.0, 20.0)), max_size=30),
)
def test_whatever_happens_each_reply_is_a_message_and_each_slot_comes_back(
    openings: list[bytes], steps: list[tuple[int, tuple[str, bytes], float]]
) -> None:
    bench = Bench(("a", "b"), cap=1)
    exchanges = [opened(bench) for _ in openings]
    script: list[tuple[int, tuple[str, Any], float]] = [
        (number, ("receive", body_message(body)), 0.0) for number, body in enumerate(openings)
    ]
    now_s = 0.0
    for number, (action, data), passed_s in itertools.chain(script, steps):
        now_s += passed_s
        reply = act(bench, exchanges[number], action, data, now_s)
        if reply is not None:
            reply_of(reply)
        live = [each for each in exchanges if each.phase is not Phase.OVER]
        assert sum(bench.in_flight.values()) <= len(live)
        assert bench.admission.waiting <= len(live)
    for exchange in exchanges:
        exchange.end(now_s)
    assert bench.in_flight == {}
    assert bench.is_idle(now_s)
    assert (bench.admission.waiting, bench.admission.waiting_bytes) == (0, 0)
