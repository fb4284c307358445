"""The client against servers that are not there, or are something else."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cli_support import KEY, free_ports, inferact

from extproc.cli.client import Client, ClientError


@contextmanager
def server(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that always answers the same; its URL, and the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", asked
        finally:
            httpd.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--watch"], ["drain", "a"], ["restore", "a"], ["explain", "a"]]
)
def test_a_service_that_is_not_there_is_one_line(command: list[str]) -> None:
    (port,) = free_ports(1)
    complaint = inferact(*command, "--url", f"http://127.0.0.1:{port}", INFERACT_ADMIN_KEY=KEY).complaint
    assert f"http://127.0.0.1:{port}" in complaint and "Is it running?" in complaint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:9001",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h/a b",
        "http://u:secret@h",
        "http://h?x",
    ],
)
def test_a_url_that_is_none_is_one_line_which_does_not_repeat_it(url: str) -> None:
    complaint = inferact("status", "--url", url).complaint
    assert "--url" in complaint and "secret" not in complaint


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"text"', b"\xff"])
def test_an_answer_that_is_no_json_object_is_from_something_else(body: bytes) -> None:
    with server(200, body) as (url, _), pytest.raises(ClientError, match="not an Inferact service"):
        Client(url).status()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{}", b'{"error": "text"}', b'{"error": {"code": 1}}', b"[]"]
)
def test_an_error_that_is_not_ours_is_told_by_its_status(body: bytes) -> None:
    with server(502, body) as (url, _), pytest.raises(ClientError, match="answered 502"):
        Client(url).status()


def test_an_error_of_several_lines_becomes_one() -> None:
    body = b'{"error": {"code": "x", "message": "first\\nsecond"}}'
    with server(500, body) as (url, _), pytest.raises(ClientError, match=r"^first second$"):
        Client(url).status()


def test_the_key_follows_no_redirect() -> None:
    with (
        server(200, b"{}") as (elsewhere, asked),
        server(307, b"", location=elsewhere) as (url, _),
        pytest.raises(ClientError, match="answered 307"),
    ):
        Client(url, KEY).drain("a")
    assert asked == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(200, b"{}") as (url, asked), server(200, b"{}") as (proxy, through_proxy):
        monkeypatch.setenv("http_proxy", proxy)
        Client(url).status()
        assert (asked, through_proxy) == (["/status"], [])


def test_a_node_id_is_one_path_segment() -> None:
    with server(200, b"{}") as (url, asked):
        Client(url, KEY).drain("a/b?c#d")
    assert asked == ["/admin/nodes/a%2Fb%3Fc%23d/drain"]
