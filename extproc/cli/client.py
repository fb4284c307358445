"""A client of the admin app, for the commands that talk to a running service."""

import json
from http.client import HTTPException
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from extproc.cli.adminkey import KEY, KEY_FILE
from extproc.headers import ADMIN_KEY

DEFAULT_URL = "http://127.0.0.1:9001"
TIMEOUT_S = 10.0
_LONGEST_ANSWER_BYTES = 64 << 20
_SHOWN_CHARS = 300

Answer = dict[str, Any]
"""A JSON object as the admin app sends it."""


class ClientError(Exception):
    """The service cannot be reached, or refuses; the message is one line that says what to do."""


class _NoRedirects(HTTPRedirectHandler):
    """Following one would hand the admin key to another server."""

    def redirect_request(self, *_: object) -> None:
        """Never: the redirect itself becomes an error."""


class Client:
    """Talks to the service at `url` (the admin app, or Envoy). Each call raises `ClientError`."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self._url = _checked(url)
        self._admin_key = admin_key
        self._opener = build_opener(ProxyHandler({}), _NoRedirects())  # our own service: no proxy in between

    def status(self) -> Answer:
        """What `GET /status` says."""
        return self._call("GET", "/status")

    def drain(self, node_id: str) -> Answer:
        """Send the node no new requests; its state."""
        return self._call("POST", f"/admin/nodes/{quote(node_id, safe='')}/drain")

    def restore(self, node_id: str) -> Answer:
        """Send the node requests again; its state."""
        return self._call("POST", f"/admin/nodes/{quote(node_id, safe='')}/restore")

    def decision(self, request_id: str) -> Answer:
        """Why a request went where it did."""
        return self._call("GET", f"/admin/decisions/{quote(request_id, safe='', errors='surrogateescape')}")

    def explain(self, body: bytes, path: str | None = None) -> Answer:
        """Where a body, sent to `path` (`None`: as a chat), would go now."""
        query = "" if path is None else f"?path={quote(path, errors='surrogateescape')}"
        return self._call("POST", f"/admin/explain{query}", body)

    def _call(self, method: str, path: str, body: bytes | None = None) -> Answer:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/json"
        if path.startswith("/admin/") and self._admin_key is not None:
            headers[ADMIN_KEY] = self._admin_key
        request = Request(self._url + path, data=body, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return self._decoded(answer)
        except HTTPError as error:
            with error:
                raise ClientError(self._refusal(error)) from error
        except URLError as error:
            raise ClientError(self._unreachable(error.reason)) from error
        except (OSError, HTTPException) as error:
            raise ClientError(self._unreachable(error)) from error

    def _decoded(self, answer: IO[bytes]) -> Answer:
        try:
            data = json.loads(answer.read(_LONGEST_ANSWER_BYTES))
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ClientError(
                f"{self._url} is not an Inferact service: its answer is not a JSON object (see --url)"
            )
        return data

    def _refusal(self, error: HTTPError) -> str:
        """What the service said, and what helps."""
        try:
            said = json.loads(error.read(_LONGEST_ANSWER_BYTES))["error"]
            code, message = str(said["code"]), " ".join(str(said["message"]).split())[:_SHOWN_CHARS]
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return f"{self._url} answered {error.code} and no Inferact error: is it the right --url?"
        advice = {
            "admin_key_required": f"set {KEY} or {KEY_FILE}",
            "admin_key_invalid": f"check {KEY} or {KEY_FILE}",
        }.get(code)
        return f"{message} ({advice})" if advice else message

    def _unreachable(self, reason: object) -> str:
        why = "it did not answer in time" if isinstance(reason, TimeoutError) else _plain(reason)
        return f"cannot reach the service at {self._url}: {why}. Is it running? See --url, or INFERACT_URL."


def _checked(url: str) -> str:
    """The URL without a slash at its end. Raises `ClientError`; never shows what may be a password."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if (
        not usable
        or not url.isascii()
        or not url.isprintable()
        or " " in url
        or "@" in url
        or "?" in url
        or "#" in url
    ):
        raise ClientError(f"--url (or INFERACT_URL) must be an http(s) URL such as {DEFAULT_URL}")
    return url.rstrip("/")


def _plain(reason: object) -> str:
    """An error's own words, on one line."""
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return " ".join(str(reason).split()) or type(reason).__name__
