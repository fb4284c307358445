"""Edits of a request body that leave every other byte as the client sent it."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Raw

HINTS_MEMBER: Final = "x-inferact"
MEMBERS: Final = (
    HINTS_MEMBER,
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
"""What engines never get from a client: hints for the router, and parameters of transfers between engines."""

_NAME_AND_COLON: Final = re.compile(rb'\s*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
_SEPARATOR: Final = re.compile(rb"\s*+[,}]")


def cut(
    body: bytes,
    members: Sequence[tuple[str, Raw]],
    model: str | None = None,
    also: Iterable[str] = (),
    first: bytes = b"",
) -> bytes:
    """The body without its top-level `MEMBERS` and those of `also`, and, if given, with `model` replaced.

    `members` are those of this very body, all of them, in order. A member goes with the white space around it
    and one comma; all duplicates are treated alike. `first` are members, as JSON, to stand before all others.
    The same object comes back when nothing changes.
    """
    new_model = None if model is None else msgspec.json.encode(model)
    gone = (*MEMBERS, *also)
    view = memoryview(body)
    start = body.index(b"{") + 1
    pieces: list[memoryview | bytes] = [view[:start], first]
    comma = b"," if first else b""
    changed = bool(first)
    for name, value in members:
        value_start = _end(_NAME_AND_COLON, body, start)
        value_end = value_start + len(value)
        end = _end(_SEPARATOR, body, value_end) - 1
        if name in gone:
            changed = True
        else:
            if name == "model" and new_model is not None and view[value_start:value_end] != new_model:
                changed = True
                pieces += (comma, view[start:value_start], new_model, view[value_end:end])
            else:
                pieces += (comma, view[start:end])
            comma = b","
        start = end + 1
    rest = view[start - 1 :] if members else view[start:]
    return b"".join((*pieces, rest)) if changed else body


def _end(pattern: re.Pattern[bytes], body: bytes, start: int) -> int:
    match = pattern.match(body, start)
    assert match is not None, "these are the members of another body"
    return match.end()
