"""What the service makes of Envoy's access log: retries, requests served, and bookings that follow."""

import pytest
from accesslog_entries import Log, attempt, begun, end, read_entry
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType, HTTPAccessLogEntry
from exchanges import MODEL, reply_of

from extproc.accesslog import Begun, Finished
from extproc.openai.errors import ErrorCode
from extproc.openai.usage import Usage
from extproc.routing.health import Event
from extproc.routing.lane import FIRST_OUTPUT_TOKENS
from extproc.routing.outcome import Attempt, Ended, Failure, Outcome


class TestAnEntry:
    def test_of_an_attempt_tells_node_and_why_it_failed(self) -> None:
        assert read_entry(attempt("a", "x-7", 0, "upstream_connection_failure", seconds=0.25)) == Attempt(
            "x-7", "a", Failure.UNREACHED, "upstream_connection_failure", 0.25
        )

    def test_of_a_request_tells_what_happened_to_it(self) -> None:
        assert read_entry(end("b", "x-7", 2, seconds=1.25)) == Finished(
            key="x-7",
            exchange_id="x-7",
            model=MODEL,
            failed_open=False,
            refused=None,
            outcome=Outcome(node_id="b", attempts=2, status=200, ended=Ended.COMPLETE, duration_s=1.25),
        )

    def test_of_a_request_that_failed_open_has_its_model_from_envoy_and_its_key_from_the_client(self) -> None:
        assert read_entry(end("b", "", 1, route="fail-open", model="m")) == Finished(
            key="from-the-client",
            exchange_id="",
            model="m",
            failed_open=True,
            refused=None,
            outcome=Outcome(node_id="b", attempts=1, status=200, ended=Ended.COMPLETE, duration_s=0.5),
        )

    def test_of_an_error_that_envoy_made_tells_the_reason(self) -> None:
        made = end("", attempts=0, status=413, route="pending")
        made.response.response_code_details = "request_payload_too_large"
        made.response.response_headers["x-inferact-reason"] = "body_too_large"
        read = read_entry(made)
        assert isinstance(read, Finished)
        assert (read.refused, read.outcome.attempts) == (ErrorCode.BODY_TOO_LARGE, 0)

    @pytest.mark.parametrize(
        ("details", "reason"),
        [
            (
                "inferact_model_not_found",
                "model_not_found",
            ),  # the service's own answer: counted when it was given
            ("direct_response", "nonsense"),
            ("request_headers_too_large", ""),
        ],
    )
    def test_of_other_errors_says_nothing(self, details: str, reason: str) -> None:
        made = end("", attempts=0, status=404, route="pending")
        made.response.response_code_details = details
        if reason:
            made.response.response_headers["x-inferact-reason"] = reason
        assert read_entry(made) is None

    def test_of_an_error_on_an_admin_path_says_nothing(self) -> None:
        made = end("", attempts=0, status=503, route="admin")
        made.response.response_headers["x-inferact-reason"] = "no_available_node"
        assert read_entry(made) is None

    @pytest.mark.parametrize("route", ["", "admin", "pending", "model_not_found"])
    def test_of_another_route_says_nothing(self, route: str) -> None:
        assert read_entry(end("a", route=route)) is None
        assert read_entry(attempt("a", route=route)) is None

    def test_of_a_request_that_reached_no_node_says_nothing(self) -> None:
        assert read_entry(end("")) is None
        assert read_entry(end("a", attempts=0)) is None
        assert read_entry(attempt("")) is None
        assert read_entry(HTTPAccessLogEntry()) is None

    @pytest.mark.parametrize(
        "kind",
        [
            AccessLogType.NotSet,
            AccessLogType.DownstreamStart,
            AccessLogType.DownstreamPeriodic,
            AccessLogType.UpstreamPoolReady,
            AccessLogType.UpstreamPeriodic,
        ],
    )
    def test_of_something_that_is_not_over_says_nothing(self, kind: int) -> None:
        unfinished = end("a")
        unfinished.common_properties.access_log_type = kind
        assert read_entry(unfinished) is None


class TestAnAttempt:
    @pytest.mark.parametrize("status", [424, 429, 500, 502, 503, 504])
    def test_failed_if_its_status_is_one_that_envoy_retries(self, status: int) -> None:
        read = read_entry(attempt("a", "x", status))
        assert isinstance(read, Attempt)
        assert (read.failure, read.reason) == (Failure.ERROR, str(status))

    @pytest.mark.parametrize("mark", ["out_of_memory", "engine_death", "overloaded"])
    def test_failed_as_envoy_read_it_in_the_body(self, mark: str) -> None:
        read = read_entry(attempt("a", "x", 500, mark=mark))
        assert isinstance(read, Attempt)
        assert (read.failure, read.reason) == (Failure(mark), "500")

    @pytest.mark.parametrize("mark", ["", "nonsense", "OUT_OF_MEMORY", "timed_out", "\N{SNOWMAN}"])
    def test_is_an_error_like_others_if_the_mark_is_unknown(self, mark: str) -> None:
        read = read_entry(attempt("a", "x", 500, mark=mark))
        assert isinstance(read, Attempt)
        assert read.failure is Failure.ERROR

    @pytest.mark.parametrize("status", [200, 204, 400, 404, 413, 422, 501, 0])
    def test_did_not_fail_if_the_engine_gave_its_answer_or_the_client_left(self, status: int) -> None:
        assert read_entry(attempt("a", "x", status)) is None

    @pytest.mark.parametrize(
        ("flag", "failure"),
        [
            ("upstream_connection_failure", Failure.UNREACHED),
            ("upstream_connection_termination", Failure.LOST),
            ("upstream_remote_reset", Failure.LOST),
            ("upstream_protocol_error", Failure.LOST),
            ("upstream_request_timeout", Failure.TIMED_OUT),
            ("upstream_overflow", Failure.ERROR),
        ],
    )
    def test_failed_if_envoy_flagged_it_and_the_flag_is_the_reason(self, flag: str, failure: Failure) -> None:
        for status in (0, 503):
            read = read_entry(attempt("a", "x", status, flag))
            assert isinstance(read, Attempt)
            assert (read.failure, read.reason) == (failure, flag)

    def test_that_broke_after_its_status_is_the_end_of_the_request_and_no_failed_attempt(self) -> None:
        assert read_entry(attempt("a", "x", 200, "upstream_remote_reset")) is None

    @pytest.mark.parametrize("flag", ["downstream_connection_termination", "downstream_remote_reset"])
    def test_that_the_client_ended_is_no_failure(self, flag: str) -> None:
        assert read_entry(attempt("a", "x", 0, flag)) is None


class TestARequest:
    def test_is_counted_on_the_node_that_served_it(self) -> None:
        log = Log()
        log.receive(attempt("b", status=200), end("b", seconds=2.0))
        assert log.served == {(MODEL, "b"): 1}
        assert log.metrics("inferact_request_latency_seconds_sum") == {("b",): 2.0}
        assert (log.nodes["b"].requests_total, log.nodes["a"].requests_total) == (1, 0)
        assert log.retries == {}
        assert log.metrics("inferact_failopen_requests_total") == {}

    def test_counts_the_attempts_before_its_last_as_retries(self) -> None:
        log = Log()
        log.receive(
            attempt("a", "x-1", 0, "upstream_connection_failure"),
            attempt("b", "x-1", 503),
            attempt("c", "x-1", 200),
            end("c", "x-1", 3),
        )
        assert log.retries == {("a", "upstream_connection_failure"): 1, ("b", "503"): 1}
        assert log.served == {(MODEL, "c"): 1}

    def test_whose_last_attempt_failed_too_was_not_retried_then(self) -> None:
        log = Log()
        log.receive(attempt("a", "x-1", 500), attempt("b", "x-1", 502), end("b", "x-1", 2, status=502))
        assert log.retries == {("a", "500"): 1}
        log.receive(attempt("a", "x-2", 500), end("a", "x-2", 1, status=500))
        assert log.retries == {("a", "500"): 1}
        assert log.unpaired == 0

    def test_is_paired_with_its_own_attempts_among_those_of_others(self) -> None:
        log = Log()
        log.receive(attempt("a", "x-1", 500), attempt("a", "x-2", 503))
        log.receive(attempt("b", "x-2", 200), end("b", "x-2", 2))
        assert log.retries == {("a", "503"): 1}
        log.receive(end("b", "x-1", 2))
        assert log.retries == {("a", "503"): 1, ("a", "500"): 1}
        assert log.unpaired == 0

    def test_may_end_in_a_later_message(self) -> None:
        log = Log()
        for each in (attempt("a", status=503), attempt("b", status=200), end("b", attempts=2)):
            log.receive(each)
        assert log.retries == {("a", "503"): 1}

    def test_whose_end_comes_before_its_attempt_is_still_served(self) -> None:
        log = Log()
        log.receive(end("b", attempts=2), attempt("a", status=503))
        assert log.served == {(MODEL, "b"): 1}
        assert log.retries == {}

    def test_that_the_client_gave_up_is_not_a_retry(self) -> None:
        """Its end comes first then, and the attempt has neither status nor flags."""
        log = Log()
        log.receive(
            attempt("a", "x-1", 503), end("b", "x-1", 2, "downstream_connection_termination", status=0)
        )
        log.receive(attempt("b", "x-1", 0))
        assert log.retries == {("a", "503"): 1}
        assert log.unpaired == 0

    def test_that_was_answered_without_a_node_counts_nowhere(self) -> None:
        log = Log()
        log.receive(end("", attempts=0, status=404), end("inferact:nowhere", route="pending", status=503))
        assert log.served == {}

    @pytest.mark.parametrize("node_id", ["gone", "inferact:admin", "A"])
    def test_on_an_unknown_node_makes_no_series(self, node_id: str) -> None:
        log = Log()
        log.receive(attempt(node_id, status=503), end(node_id, attempts=2))
        assert (log.served, log.retries) == ({}, {})

    def test_for_an_unknown_model_is_counted_as_other(self) -> None:
        log = Log()
        log.receive(end("a", model="made-up"), end("a", model=""))
        assert log.served == {("other", "a"): 2}


class TestFailOpen:
    def test_is_counted_and_so_is_its_request(self) -> None:
        log = Log()
        log.receive(end("a", "", 1, route="fail-open"), end("b"))
        assert log.metrics("inferact_failopen_requests_total") == {(): 1}
        assert log.served == {(MODEL, "a"): 1, (MODEL, "b"): 1}

    def test_pairs_attempts_by_the_clients_request_id(self) -> None:
        log = Log()
        log.receive(attempt("a", "", 503, route="fail-open"), end("b", "", 2, route="fail-open"))
        assert log.retries == {("a", "503"): 1}

    def test_moves_no_booking(self) -> None:
        """The client chose the request id: it joins nothing but what failed open."""
        log = Log()
        exchange = log.lives(log.running())
        assert exchange.request_id == "req-1"
        failed = attempt("a", "", 503, route="fail-open")
        failed.request.request_id = exchange.request_id
        log.receive(failed)
        assert log.in_flight == {"a": 1}


class TestABooking:
    def test_follows_its_request_to_the_next_node(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        log.receive(attempt("a", exchange.id, 503))
        assert log.in_flight == {"b": 1}
        log.receive(attempt("b", exchange.id, 0, "upstream_connection_failure"))
        assert log.in_flight == {"c": 1}
        log.receive(attempt("c", exchange.id, 200), end("c", exchange.id, 3))
        assert log.in_flight == {"c": 1}, "it is the end of the stream that frees"
        exchange.end(9.0)
        assert log.in_flight == {}

    def test_stays_when_an_attempt_succeeds(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        log.receive(attempt("a", exchange.id, 200))
        assert log.in_flight == {"a": 1}

    def test_stays_when_the_attempt_of_another_request_fails(self) -> None:
        log = Log()
        log.lives(log.running())
        log.receive(attempt("a", "x-other", 503))
        assert log.in_flight == {"a": 1}

    def test_leaves_its_slot_to_one_who_waits(self) -> None:
        log = Log(("a", "b"), cap=1)
        exchange = log.lives(log.running())
        log.running()
        waiting = log.queued()
        log.receive(attempt("a", exchange.id, 503))
        assert reply_of(waiting.resume(5.0)).WhichOneof("response") == "request_body"
        assert log.metrics("inferact_queue_wait_seconds_count") == {(): 1}

    def test_is_not_taken_again_by_an_entry_that_comes_late(self) -> None:
        log = Log()
        exchange = log.running()
        exchange.end(1.0)
        log.receive(attempt("a", exchange.id, 503), end("b", exchange.id, 2))
        assert log.in_flight == {}
        assert log.retries == {("a", "503"): 1}, "but it is still counted"


class TestTheEnd:
    @pytest.mark.parametrize(
        ("flags", "status", "ended"),
        [
            ((), 200, Ended.COMPLETE),
            ((), 400, Ended.ERROR),
            (("upstream_retry_limit_exceeded",), 503, Ended.ERROR),
            (("upstream_connection_failure",), 503, Ended.ERROR),
            (("upstream_connection_termination",), 200, Ended.BROKEN),
            (("upstream_remote_reset",), 200, Ended.BROKEN),
            (("downstream_connection_termination",), 200, Ended.CLIENT_LEFT),
            (("downstream_connection_termination",), 0, Ended.CLIENT_LEFT),
            (("downstream_remote_reset",), 200, Ended.CLIENT_LEFT),
            (("stream_idle_timeout",), 200, Ended.TIMED_OUT),
            (("upstream_request_timeout",), 504, Ended.TIMED_OUT),
            (("local_reset", "downstream_connection_termination"), 200, Ended.CLIENT_LEFT),
        ],
    )
    def test_is_read_from_flags_and_status(self, flags: tuple[str, ...], status: int, ended: Ended) -> None:
        read = read_entry(end("a", "x-1", 1, *flags, status=status))
        assert isinstance(read, Finished)
        assert (read.outcome.ended, read.outcome.status) == (ended, status)

    def test_within_a_stream_of_status_200_is_an_error_too(self) -> None:
        read = read_entry(end("a", error="yes", usage='{"prompt_tokens":3}'))
        assert isinstance(read, Finished)
        assert (read.outcome.ended, read.outcome.usage) == (Ended.ERROR, None)


class TestAStreamThatRuns:
    def test_has_begun_when_its_first_token_came(self) -> None:
        assert read_entry(begun(0.25)) == Begun("x-1", pytest.approx(0.25))

    def test_tells_nothing_without_a_time_or_of_an_exchange_that_is_not_ours(self) -> None:
        assert read_entry(begun(None)) is None
        assert read_entry(begun(None, first_token_us="nonsense")) is None
        assert read_entry(begun(-0.1)) is None
        assert read_entry(begun(0.25, key="")) is None

    def test_moves_the_booking_of_its_exchange_and_no_count(self) -> None:
        log = Log()
        exchange = log.lives(log.running(stream=True))
        assert exchange.decision is not None
        log.receive(begun(0.25, key=exchange.id), begun(0.25, key="unknown"))
        assert exchange.decision.booking.has_begun
        assert log.metrics("inferact_requests_total") == {}


class TestWhatEnvoyReadInTheAnswer:
    def test_is_the_time_of_the_first_token_and_the_usage(self) -> None:
        read = read_entry(end("a", first_token_s=0.25, usage='{"prompt_tokens":3,"completion_tokens":2}'))
        assert isinstance(read, Finished)
        assert read.outcome.ttft_s == pytest.approx(0.25)
        assert read.outcome.usage == Usage(3, 2)

    @pytest.mark.parametrize("stamp", ["", "-1", "1.5", "nonsense", "9" * 17, "9" * 5000, "0", "\N{SNOWMAN}"])
    def test_is_no_time_if_it_cannot_be_one(self, stamp: str) -> None:
        read = read_entry(end("a", first_token_us=stamp))
        assert isinstance(read, Finished)
        assert read.outcome.ttft_s is None

    @pytest.mark.parametrize("first_token_s", [-0.1, 0.6, 3600.0])
    def test_is_no_time_if_someone_set_the_clock(self, first_token_s: float) -> None:
        read = read_entry(end("a", seconds=0.5, first_token_s=first_token_s))
        assert isinstance(read, Finished)
        assert read.outcome.ttft_s is None

    @pytest.mark.parametrize("usage", ["", "{", "[]", '{"prompt_tokens":"3"}', "{" * 4000, "\N{SNOWMAN}"])
    def test_is_no_usage_if_it_makes_no_sense(self, usage: str) -> None:
        read = read_entry(end("a", usage=usage))
        assert isinstance(read, Finished)
        assert read.outcome.usage is None

    def test_is_counted_on_the_node_that_served(self) -> None:
        log = Log()
        details = '{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":48}}'
        log.receive(end("b", first_token_s=0.25, usage=details))
        log.receive(end("b", first_token_s=0.25, usage='{"prompt_tokens":7}'), end("b", first_token_s=0.25))
        assert log.metrics("inferact_ttft_seconds_count") == {("b",): 3}
        assert log.metrics("inferact_prompt_tokens_total") == {
            ("b", "cached"): 48,
            ("b", "computed"): 52,
            ("b", "unknown"): 7,
        }
        assert log.metrics("inferact_streams_without_usage_total") == {("b",): 1}

    def test_is_that_nothing_was_cached_where_the_engine_tells_only_what_was(self) -> None:
        log = Log()
        told = '{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":48}}'
        for usage in (told, '{"prompt_tokens":7}', '{"prompt_tokens":5,"prompt_tokens_details":null}'):
            exchange = log.ended()
            log.receive(end("b", exchange.id, usage=usage))
        assert log.outcomes[exchange.id].usage == Usage(5, 0, 0)
        assert log.metrics("inferact_prompt_tokens_total") == {("b", "cached"): 48, ("b", "computed"): 64}
        assert log.nodes["b"].hit_ratio(5.0) == pytest.approx(48 / 112)

    def test_is_counted_of_what_failed_open_too(self) -> None:
        log = Log()
        log.receive(end("b", "", route="fail-open", usage='{"prompt_tokens":7}'))
        assert log.metrics("inferact_prompt_tokens_total") == {("b", "unknown"): 7}
        assert log.outcomes == {}


class TestAnOutcome:
    USAGE = '{"prompt_tokens":100,"completion_tokens":1000}'

    def learned(self, log: Log) -> bool:
        return log.router._lanes[MODEL].output_tokens != FIRST_OUTPUT_TOKENS

    def test_joins_an_exchange_that_is_over(self) -> None:
        log = Log()
        exchange = log.ended()
        log.receive(end("a", exchange.id, usage=self.USAGE))
        assert self.learned(log)
        assert log.outcomes[exchange.id].usage == Usage(100, 1000)

    def test_joins_an_exchange_that_still_lives(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        log.receive(end("a", exchange.id, usage=self.USAGE))
        assert self.learned(log)
        assert log.in_flight == {"a": 1}, "it is the end of the stream that frees"

    def test_counts_once(self) -> None:
        log = Log()
        exchange = log.ended()
        log.receive(end("a", exchange.id, usage=self.USAGE))
        learned = log.router._lanes[MODEL].output_tokens
        log.receive(end("a", exchange.id, usage=self.USAGE))
        assert log.router._lanes[MODEL].output_tokens == learned

    def test_of_an_exchange_that_nobody_knows_is_still_told(self) -> None:
        log = Log()
        log.receive(end("a", "x-unknown", usage=self.USAGE))
        assert not self.learned(log)
        assert log.outcomes["x-unknown"].usage == Usage(100, 1000)

    def test_is_told_of_an_exchange_that_came_to_no_node(self) -> None:
        log = Log()
        exchange = log.ended()
        failed = end("", exchange.id, 0, "no_healthy_upstream", status=503)
        failed.response.response_headers["x-inferact-reason"] = "no_available_node"
        log.receive(failed)
        outcome = log.outcomes[exchange.id]
        assert (outcome.node_id, outcome.attempts, outcome.ended) == ("", 0, Ended.ERROR)

    def test_joins_nothing_by_an_id_that_the_client_chose(self) -> None:
        log = Log()
        exchange = log.ended()
        forged = end("a", "", route="fail-open", usage=self.USAGE)
        forged.request.request_id = exchange.id
        log.receive(forged)
        assert not self.learned(log)
        assert log.outcomes == {}

    def test_of_a_removed_node_breaks_nothing(self) -> None:
        log = Log()
        exchange = log.ended()
        log.receive(end("gone", exchange.id, usage=self.USAGE, first_token_s=0.1))
        assert log.outcomes[exchange.id].node_id == "gone"


class TestAFailure:
    def test_is_on_the_receipt(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        assert exchange.decision is not None
        log.receive(
            attempt("a", exchange.id, 424, mark="out_of_memory"),
            attempt("b", exchange.id, 503),
            attempt("c", exchange.id, 0, "upstream_remote_reset"),
        )
        assert exchange.decision.receipt.failed == [
            ("a", "424 out_of_memory"),
            ("b", "503"),
            ("c", "upstream_remote_reset"),
        ]

    def test_is_on_the_receipt_even_if_the_log_is_late(self) -> None:
        log = Log()
        exchange = log.ended()
        assert exchange.decision is not None
        log.receive(attempt("a", exchange.id, 500))
        assert exchange.decision.receipt.failed == [("a", "500")]

    def test_counts_against_its_node_once_another_has_served(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        log.receive(attempt("a", exchange.id, 500))
        assert log.watch.events == []
        log.receive(end("b", exchange.id, 2))
        assert log.watch.events == [("b", Event.SERVED), ("a", Event.FAILED)]

    def test_for_want_of_memory_is_counted_once_others_made_it_good(self) -> None:
        log = Log()
        ids = [log.lives(log.running()).id for _ in range(3)]
        log.receive(*(attempt("a", each, 424, mark="out_of_memory") for each in ids))
        assert log.watch.events == [("a", Event.OUT_OF_MEMORY)]
        assert log.metrics("inferact_oom_events_total") == {}
        log.receive(*(end("b", each, 2) for each in ids))
        assert log.metrics("inferact_oom_events_total") == {("a",): 1}
        assert log.retries == {("a", "424"): 3}

    def test_is_judged_while_the_node_still_has_its_booking(self) -> None:
        """How many requests it had when it ran out of memory is what its limit follows from."""
        log = Log()
        exchange = log.lives(log.running())
        seen: list[dict[str, int]] = []
        log.watch.happened = lambda *_: seen.append(log.in_flight)  # type: ignore[method-assign]
        log.receive(attempt("a", exchange.id, 424, mark="out_of_memory"))
        assert seen == [{"a": 1}]
        assert log.in_flight == {"b": 1}

    def test_of_a_lost_connection_is_held_against_the_prompt(self) -> None:
        log = Log()
        exchange = log.lives(log.running())
        assert exchange.decision is not None
        log.receive(attempt("a", exchange.id, 0, "upstream_connection_termination"))
        assert log.watch.doubted == ["a"]
        log.router.quarantine.died("a", 5.0)
        assert log.router.quarantine.dead_nodes(exchange.decision.blocks.fingerprint) == 1
