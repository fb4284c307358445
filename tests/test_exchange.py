"""One request through the state machine: each message of Envoy's, and the reply to it."""

import json
import tracemalloc
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from exchanges import (
    ANSWER_MESSAGES,
    CHAT,
    MODEL,
    Bench,
    body_message,
    chat_body,
    headers_message,
    opened,
    refused,
    reply_of,
    routed,
)

from extproc.exchange import Phase, ProtocolError
from extproc.openai.request import Api
from extproc.routing.node import Health


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
        assert opened(Bench(), x_request_id="abc-7").request_id == "abc-7"

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
        hints: dict[str, Any] = {"x-inferact": {"priority": 1}}
        exchange = bench.queued(**hints)
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

    @pytest.mark.parametrize(
        "kind",
        [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "json",
            "application/json; charset=utf-7",
            "application/json; a=b; charset=utf-16",
        ],
    )
    def test_of_another_content_type_is_a_415(self, kind: str) -> None:
        exchange = opened(Bench(), content_type=kind)
        status, code, _ = refused(exchange.receive(body_message(chat_body()), 0.0))
        assert (status, code) == (415, "unsupported_media_type")

    @pytest.mark.parametrize(
        "kind",
        [
            "",
            "application/json; charset=utf-8",
            'application/json;charset="UTF8"',
            "application/json; a=b",
            "Application/JSON",
            "application/vnd.x+json",
        ],
    )
    def test_is_not_made_of_json_by_any_of_its_names(self, kind: str) -> None:
        exchange = opened(Bench(), content_type=kind)
        routed(exchange.receive(body_message(chat_body()), 0.0))

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
