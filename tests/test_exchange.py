"""One request through the state machine: each message of Envoy's, and the reply to it."""

import contextlib
import itertools
import json
import tracemalloc
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from exchanges import (
    ANSWER_MESSAGES,
    CHAT,
    MODEL,
    TIMEOUT_S,
    Bench,
    body_message,
    chat_body,
    headers_message,
    reply_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.exchange import Exchange, Phase, ProtocolError
from extproc.openai.request import Api
from extproc.replies import HOLD_MARGIN_S
from extproc.routing.node import Health


def opened(bench: Bench, now_s: float = 0.0, **headers: str) -> Exchange:
    """An exchange that waits for its body."""
    exchange = bench.exchange()
    exchange.receive(headers_message(**headers), now_s)
    return exchange


def routed(reply: bytes | None) -> tuple[dict[str, str], bytes | None]:
    """The headers that a routing reply sets, and the body if it replaces it."""
    message = reply_of(reply)
    assert message.WhichOneof("response") == "request_body"
    common = message.request_body.response
    assert common.clear_route_cache, "else the route that was chosen before stands"
    assert not common.header_mutation.remove_headers
    options = common.header_mutation.set_headers
    for option in options:
        assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert not option.header.value, "raw_value is the one that Envoy takes as it is"
    values = {option.header.key: option.header.raw_value.decode() for option in options}
    assert len(values) == len(options)
    changed = common.HasField("body_mutation")
    return values, common.body_mutation.body if changed else None


def refused(reply: bytes | None) -> tuple[int, str, dict[str, str]]:
    """Status, `error.code` and headers of an answer to the client."""
    message = reply_of(reply)
    assert message.WhichOneof("response") == "immediate_response"
    answer = message.immediate_response
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.details == f"inferact_{error['code']}"
    headers = {}
    for option in answer.headers.set_headers:
        assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        headers[option.header.key] = option.header.raw_value.decode()
    assert headers["content-type"] == "application/json"
    assert headers["x-inferact-reason"] == error["code"]
    return answer.status.code, error["code"], headers


class TestHeaders:
    def test_are_answered_with_nothing_but_go_on(self) -> None:
        reply = reply_of(Bench().exchange().receive(headers_message(), 0.0))
        assert reply.WhichOneof("response") == "request_headers"
        assert reply.ByteSize() == 2, "an empty message inside the reply"

    def test_book_nothing_yet(self) -> None:
        bench = Bench()
        exchange = opened(bench)
        assert exchange.phase is Phase.BODY
        assert bench.in_flight == {}

    def test_tell_the_request_id(self) -> None:
        assert opened(Bench(), **{"x-request-id": "abc-7"}).request_id == "abc-7"

    def test_may_come_with_values_as_text(self) -> None:
        """`value` instead of `raw_value`, as older Envoys send it."""
        pairs = [HeaderValue(key=":path", value=CHAT), HeaderValue(key="x-request-id", value="abc-7")]
        message = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=pairs)))
        bench = Bench()
        exchange = bench.exchange()
        exchange.receive(message.SerializeToString(), 0.0)
        assert exchange.request_id == "abc-7"
        routed(exchange.receive(body_message(chat_body()), 0.0))

    def test_of_a_request_without_a_body_get_a_400(self) -> None:
        bench = Bench()
        status, code, _ = refused(bench.exchange().receive(headers_message(end=True), 0.0))
        assert (status, code) == (400, "invalid_json")
        assert bench.metrics("inferact_rejections_total") == {("invalid_json",): 1}

    def test_give_each_exchange_an_id_of_its_own(self) -> None:
        bench = Bench()
        assert len({bench.exchange().id for _ in range(100)}) == 100


class TestTheRoutingReply:
    def test_sets_the_node_its_fallbacks_and_the_exchange(self) -> None:
        exchange = opened(Bench())
        values, body = routed(exchange.receive(body_message(chat_body()), 0.0))
        assert values == {
            "x-inferact-id": exchange.id,
            "x-inferact-cluster": "a",
            "x-inferact-retry-1": "b",
            "x-inferact-retry-2": "c",
            "x-envoy-max-retries": "2",
            "x-envoy-upstream-rq-timeout-ms": "30000",
        }
        assert body is None
        assert exchange.phase is Phase.ANSWERED

    @pytest.mark.parametrize(
        ("names", "fallbacks"), [(("a",), {}), (("a", "b"), {"x-inferact-retry-1": "b"})]
    )
    def test_names_only_the_fallbacks_there_are(
        self, names: tuple[str, ...], fallbacks: dict[str, str]
    ) -> None:
        values, _ = routed(opened(Bench(names)).receive(body_message(chat_body()), 0.0))
        assert {name: value for name, value in values.items() if "retry-" in name} == fallbacks
        assert values["x-envoy-max-retries"] == str(len(fallbacks))

    def test_names_no_fallback_for_a_pinned_request(self) -> None:
        body = chat_body(**{"x-inferact": {"node_affinity": "b"}})
        values, _ = routed(opened(Bench()).receive(body_message(body), 0.0))
        assert (values["x-inferact-cluster"], values["x-envoy-max-retries"]) == ("b", "0")

    def test_books_the_node(self) -> None:
        bench = Bench()
        bench.running()
        assert bench.in_flight == {"a": 1}

    @pytest.mark.parametrize("api", list(Api))
    def test_is_given_on_every_routed_path(self, api: Api) -> None:
        exchange = opened(Bench(), path=f"{api.value}?api-version=1")
        routed(exchange.receive(body_message(chat_body()), 0.0))

    def test_carries_the_public_model_as_metadata(self) -> None:
        bench = Bench(settings={"model_aliases": {"gpt": MODEL}})
        reply = reply_of(opened(bench).receive(body_message(chat_body(model="gpt")), 0.0))
        metadata = reply.dynamic_metadata.fields["inferact"].struct_value
        assert {name: value.string_value for name, value in metadata.fields.items()} == {"model": "gpt"}

    def test_does_not_depend_on_end_of_stream(self) -> None:
        """A decompressor before us makes the whole body come with it false."""
        routed(opened(Bench()).receive(body_message(chat_body(), end=False), 0.0))


class TestTheBody:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"model":"llama-8b"}',
            b' {\n"model" : "llama-8b",\t"temperature":1.0e-0, "seed":18446744073709551616 } \r\n',
            rb'{"model":"\u006clama-8b","prompt":"\ud83d\ude00 \/","priority":3}',
            '{"model":"llama-8b","prompt":"\N{SNOWMAN}","prompt":"twice"}'.encode(),
        ],
    )
    def test_goes_to_the_node_as_it_came(self, body: bytes) -> None:
        values, replaced = routed(opened(Bench()).receive(body_message(body), 0.0))
        assert replaced is None
        assert "content-length" not in values

    def test_loses_the_members_that_engines_must_not_see(self) -> None:
        body = b'{"model": "llama-8b", "x-inferact": {"priority": 9}, "n": 1.0, "bootstrap_host": "evil"}'
        values, replaced = routed(opened(Bench()).receive(body_message(body), 0.0))
        assert replaced == b'{"model": "llama-8b", "n": 1.0}'
        assert values["content-length"] == str(len(replaced))

    def test_names_the_model_as_the_engine_does(self) -> None:
        bench = Bench(settings={"model_aliases": {"gpt": 'odd "näme"'}})
        body = b'{"n": 1.0, "model": "gpt"}'
        values, replaced = routed(opened(bench).receive(body_message(body), 0.0))
        assert replaced is not None
        assert replaced.startswith(b'{"n": 1.0, "model": ')
        assert json.loads(replaced)["model"] == 'odd "näme"'
        assert values["content-length"] == str(len(replaced))

    def test_is_not_kept_while_the_answer_runs(self) -> None:
        bench = Bench(("a",), cap=10)
        tracemalloc.start()
        try:
            prompt = "x" * 500_000
            exchanges = [bench.running(prompt=prompt) for _ in range(10)]
            exchanges.append(bench.queued(prompt=prompt))
            exchanges.pop(0).end(1.0)
            routed(exchanges[-1].resume(1.0))
            assert tracemalloc.get_traced_memory()[0] < 2 * len(prompt)
        finally:
            tracemalloc.stop()

    def test_is_cut_when_the_request_comes_out_of_the_queue_too(self) -> None:
        bench = Bench(("a",), cap=1)
        busy = bench.running()
        exchange = bench.queued(**{"x-inferact": {"priority": 1}})
        busy.end(1.0)
        _, replaced = routed(exchange.resume(1.0))
        assert replaced == chat_body()


class TestARefusal:
    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            (b"", 400, "invalid_json"),
            (b"{", 400, "invalid_json"),
            (b"[1]", 400, "invalid_request"),
            (b"\xff\xfe", 400, "invalid_json"),
            (b'{"messages": []}', 400, "invalid_request"),
            (chat_body(model=7), 400, "invalid_request"),
            (chat_body(model="unheard-of"), 404, "model_not_found"),
            (chat_body(**{"x-inferact": {"priority": 11}}), 400, "invalid_hint"),
            (chat_body(**{"x-inferact": {"node_affinity": "unheard-of"}}), 400, "invalid_hint"),
        ],
    )
    def test_says_what_is_wrong_with_the_body(self, body: bytes, status: int, code: str) -> None:
        bench = Bench()
        exchange = opened(bench)
        assert refused(exchange.receive(body_message(body), 0.0))[:2] == (status, code)
        assert exchange.phase is Phase.ANSWERED
        assert bench.metrics("inferact_rejections_total") == {(code,): 1}
        exchange.end(1.0)
        assert bench.in_flight == {}

    @pytest.mark.parametrize("path", ["/", "", "/v1/models", "/v1/chat/completions/"])
    @pytest.mark.parametrize("end", [True, False])
    def test_of_an_unknown_path_is_a_404(self, path: str, end: bool) -> None:
        exchange = Bench().exchange()
        reply = exchange.receive(headers_message(path, end), 0.0)
        if not end:
            reply = exchange.receive(body_message(chat_body()), 0.0)
        assert refused(reply)[:2] == (404, "not_found")

    def test_of_a_request_without_a_path_is_a_404(self) -> None:
        exchange = Bench().exchange()
        exchange.receive(ProcessingRequest(request_headers=HttpHeaders()).SerializeToString(), 0.0)
        assert refused(exchange.receive(body_message(chat_body()), 0.0))[:2] == (404, "not_found")

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "gzip, br", "\N{SNOWMAN}"])
    def test_of_an_encoding_that_nobody_took_off_is_a_415(self, encoding: str) -> None:
        exchange = opened(Bench(), content_encoding=encoding)
        assert refused(exchange.receive(body_message(chat_body()), 0.0))[:2] == (
            415,
            "unsupported_media_type",
        )

    @pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
    def test_is_not_made_of_a_plain_body_that_calls_itself_plain(self, encoding: str) -> None:
        exchange = opened(Bench(), content_encoding=encoding)
        routed(exchange.receive(body_message(chat_body()), 0.0))

    def test_tells_when_to_come_back_while_all_nodes_are_away(self) -> None:
        bench = Bench(("a",))
        bench.nodes["a"].health = Health.OFFLINE
        status, code, headers = refused(opened(bench).receive(body_message(chat_body()), 0.0))
        assert (status, code, headers["retry-after"]) == (503, "no_available_node", "1")

    def test_tells_when_to_come_back_while_the_queue_is_full(self) -> None:
        bench = Bench(("a",), cap=1, max_waiting=1)
        bench.running()
        bench.queued()
        status, code, headers = refused(opened(bench).receive(body_message(chat_body()), 0.0))
        assert (status, code, headers["retry-after"]) == (429, "queue_full", "1")

    def test_has_no_retry_after_where_coming_back_does_not_help(self) -> None:
        assert "retry-after" not in refused(opened(Bench()).receive(body_message(b"{"), 0.0))[2]


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
        assert values["x-envoy-upstream-rq-per-try-timeout-ms"] == "20000"

    def test_are_whole_milliseconds_and_never_zero(self) -> None:
        exchange = Bench().exchange(timeout_s=0.001)
        exchange.receive(headers_message(), 0.0)
        values, _ = routed(exchange.receive(body_message(chat_body(stream=True)), 0.0))
        assert values["x-envoy-upstream-rq-per-try-timeout-ms"] == "1"


class TestMessagesOutOfOrder:
    @pytest.mark.parametrize("message", [body_message(chat_body()), *ANSWER_MESSAGES.values()])
    def test_are_refused_before_the_headers(self, message: bytes) -> None:
        with pytest.raises(ProtocolError, match="HEADERS"):
            Bench().exchange().receive(message, 0.0)

    @pytest.mark.parametrize("message", [headers_message(), *ANSWER_MESSAGES.values()])
    def test_are_refused_between_headers_and_body(self, message: bytes) -> None:
        exchange = opened(Bench())
        with pytest.raises(ProtocolError, match="BODY"):
            exchange.receive(message, 0.0)

    @pytest.mark.parametrize(
        "message", [headers_message(), body_message(chat_body()), *ANSWER_MESSAGES.values()]
    )
    def test_are_refused_while_the_request_waits(self, message: bytes) -> None:
        bench = Bench(("a",), cap=1)
        bench.running()
        exchange = bench.queued()
        with pytest.raises(ProtocolError, match="QUEUED"):
            exchange.receive(message, 0.0)
        exchange.end(0.0)
        assert bench.admission.waiting == 0

    @pytest.mark.parametrize("message", [headers_message(), body_message(chat_body())])
    def test_are_refused_when_they_come_twice(self, message: bytes) -> None:
        bench = Bench()
        exchange = bench.running()
        with pytest.raises(ProtocolError, match="ANSWERED"):
            exchange.receive(message, 0.0)
        assert bench.in_flight == {"a": 1}

    @pytest.mark.parametrize(
        "message", [headers_message(), body_message(chat_body()), *ANSWER_MESSAGES.values()]
    )
    def test_are_refused_after_the_end(self, message: bytes) -> None:
        exchange = Bench().running()
        exchange.end(1.0)
        with pytest.raises(ProtocolError, match="OVER"):
            exchange.receive(message, 1.0)

    @pytest.mark.parametrize("message", [b"", b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"GET / HTTP/1.1\r\n"])
    def test_and_bytes_that_are_no_message_are_refused(self, message: bytes) -> None:
        with pytest.raises(ProtocolError):
            Bench().exchange().receive(message, 0.0)

    def test_are_told_without_a_byte_of_the_request(self) -> None:
        exchange = Bench().running()
        with pytest.raises(ProtocolError) as raised:
            exchange.receive(body_message(chat_body(prompt="a secret")), 0.0)
        assert "secret" not in str(raised.value)


class TestTheAnswer:
    @pytest.mark.parametrize("kind", list(ANSWER_MESSAGES))
    def test_is_let_through_by_an_envoy_that_shows_it(self, kind: str) -> None:
        reply = reply_of(Bench().running().receive(ANSWER_MESSAGES[kind], 1.0))
        assert reply.WhichOneof("response") == kind
        assert reply.ByteSize() == 2

    def test_of_our_own_is_let_through_too(self) -> None:
        """Envoy shows our refusals like any other answer."""
        exchange = opened(Bench())
        exchange.receive(body_message(b"{"), 0.0)
        reply = reply_of(exchange.receive(ANSWER_MESSAGES["response_headers"], 0.0))
        assert reply.WhichOneof("response") == "response_headers"


class TestTheEnd:
    def test_frees_the_node(self) -> None:
        bench = Bench()
        bench.running().end(1.0)
        assert bench.in_flight == {}
        assert bench.nodes["a"].booked_s == 0.0

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
    assert [node.booked_s for node in bench.nodes.values()] == [0.0, 0.0]
    assert (bench.admission.waiting, bench.admission.waiting_bytes) == (0, 0)
