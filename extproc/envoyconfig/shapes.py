"""Envoy's resources as JSON shapes, written as in Envoy's own documentation."""

from http import HTTPStatus
from typing import Any

from extproc import headers
from extproc.openai.errors import ErrorCode

Json = dict[str, Any]
"""A JSON object; the tests parse every resource with Envoy's protobuf messages."""

TYPE = "type.googleapis.com/"

EXTPROC_CLUSTER = "inferact:extproc"
"""The ext_proc and access-log services. No node id has a colon."""
ADMIN_CLUSTER = "inferact:admin"
"""The admin app."""
NOWHERE_CLUSTER = "inferact:nowhere"
"""No endpoint: for a request that nobody may take."""
ROUTES = "inferact"
"""Name of the route configuration."""


def typed(name: str, message: str, **fields: Any) -> Json:
    """An extension: its name, and a `typed_config` of the protobuf type `message`."""
    return {"name": name, "typed_config": typed_config(message, **fields)}


def typed_config(message: str, **fields: Any) -> Json:
    """A protobuf `Any` of the type `message`."""
    return {"@type": TYPE + message, **fields}


def tcp(host: str, port: int) -> Json:
    """A socket address."""
    return {"socket_address": {"address": host, "port_value": port}}


def pipe(path: str) -> Json:
    """A Unix socket address."""
    return {"pipe": {"path": path}}


def milliseconds(count: int) -> str:
    """A protobuf duration, exact to the millisecond."""
    return f"{count / 1000:.3f}s"


def set_header(name: str, value: str) -> Json:
    """A header that replaces what is there."""
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def error_body(code: ErrorCode, message: str) -> Json:
    """The OpenAI error shape."""
    return {"error": {"message": message, "type": code.type.value, "param": None, "code": code.value}}


def error_headers(code: ErrorCode) -> list[Json]:
    """What goes with it: the reason, and when to come back where that helps."""
    later = [set_header("retry-after", "1")] if code.status == HTTPStatus.SERVICE_UNAVAILABLE else []
    return [set_header(headers.REASON, code.value), *later]
