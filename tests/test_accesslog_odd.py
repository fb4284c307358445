"""Access-log entries that nobody should send: none is fatal, none costs another, memory stays bounded."""

import logging

import pytest
from accesslog_entries import STARTED_US, Log, attempt, end, message, read_entry
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon, HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from exchanges import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.accesslog import Finished
from extproc.entries import read_batch
from extproc.routing.blame import UNPAIRED_KEPT
from extproc.routing.router import FALLBACKS


class TestBadInput:
    @pytest.mark.parametrize("junk", [b"\xff", b"\x12\xff\xff\xff\xff\x0f", b"secret " * 10])
    def test_is_logged_without_its_content_and_lost(
        self, junk: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = Log()
        with caplog.at_level(logging.DEBUG):
            log.log.receive(junk)
        assert f"{len(junk)} bytes" in caplog.text
        assert "secret" not in caplog.text
        log.receive(end("a"))
        assert log.served == {(MODEL, "a"): 1}

    def test_that_is_an_empty_message_is_no_news(self) -> None:
        log = Log()
        log.log.receive(b"")
        log.log.receive(StreamAccessLogsMessage(identifier={"log_name": "inferact"}).SerializeToString())
        assert log.served == {}

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(
            st.builds(
                attempt,
                st.sampled_from(["a", "b", "gone", ""]),
                st.sampled_from(["x-1", "x-2", ""]),
                st.sampled_from([0, 200, 503, 2**32 - 1]),
                route=st.sampled_from(["routed", "fail-open", "pending"]),
            )
            | st.builds(
                end,
                st.sampled_from(["a", "b", "gone", ""]),
                st.sampled_from(["x-1", "x-2", ""]),
                st.sampled_from([0, 1, 2, 3, 2**32 - 1]),
                route=st.sampled_from(["routed", "fail-open", "pending"]),
                model=st.sampled_from([MODEL, "", "\N{SNOWMAN}"]),
                usage=st.sampled_from(["", "{", '{"prompt_tokens":1e99}', '{"prompt_tokens":7}']),
                error=st.sampled_from(["", "yes"]),
                first_token_us=st.sampled_from(["", "0", "-1", str(STARTED_US), "9" * 99]),
            ),
            max_size=30,
        )
    )
    def test_of_any_kind_and_order_counts_what_it_can(self, entries: list[HTTPAccessLogEntry]) -> None:
        log = Log()
        for each in entries:
            log.receive(each)
        ends = [each for each in entries if isinstance(read_entry(each), Finished)]
        known = [each for each in ends if each.common_properties.upstream_cluster in log.nodes]
        assert sum(log.served.values()) == len(known)
        assert log.unpaired <= 2 * (FALLBACKS + 1) + (FALLBACKS + 1)


class TestMemory:
    def test_is_bounded_by_the_number_of_requests(self) -> None:
        log = Log()
        numbers = range(UNPAIRED_KEPT + 10)
        log.receive(*(attempt("a", f"x-{number}", 503) for number in numbers))
        assert log.unpaired == UNPAIRED_KEPT
        log.receive(end("b", "x-0", 2))
        assert log.retries == {}, "the oldest are forgotten"
        log.receive(end("b", f"x-{numbers[-1]}", 2))
        assert log.retries == {("a", "503"): 1}
        assert log.unpaired == UNPAIRED_KEPT - 1

    def test_is_bounded_for_each_request(self) -> None:
        """In fail-open mode a client may send one id with every request."""
        log = Log()
        log.receive(*(attempt("a", "", 503, route="fail-open") for _ in range(1000)))
        assert log.unpaired == FALLBACKS + 1

    def test_is_not_used_by_attempts_that_succeed(self) -> None:
        log = Log()
        log.receive(*(attempt("a", f"x-{number}", 200) for number in range(100)))
        assert log.unpaired == 0


@pytest.mark.parametrize("field", ["user_agent", "referer", "request_id", "forwarded_for", "path"])
def test_bytes_that_are_no_text_lose_no_entry(field: str) -> None:
    log = Log()
    odd = end("a", "")
    setattr(odd.request, field, "mark")
    raw = message(end("b"), odd, end("b")).replace(b"mark", b"\xff\xfe\x00\xff")
    log.log.receive(raw)
    assert log.served == {(MODEL, "a"): 1, (MODEL, "b"): 2}


def test_the_messages_agree_with_envoys_own() -> None:
    """Every field that is read has the number that Envoy's definition gives it."""
    common = AccessLogCommon.DESCRIPTOR.fields_by_name
    ours = read_batch(message(end("a")))[0].common.DESCRIPTOR.fields_by_name
    renamed = {"attempts": "upstream_request_attempt_count", "kind": "access_log_type"}
    for name, field in ours.items():
        assert field.number == common[renamed.get(name, name)].number, name
