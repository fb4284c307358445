"""The top-level members of a JSON object as they stand in the bytes."""

import re
from typing import Final

import msgspec
from msgspec import Raw

from extproc.openai.errors import ApiError, ErrorCode

# Bounds on the Python work that a body can cause: one of 64 MB could hold ten million members.
MAX_MEMBERS: Final = 256
MAX_NAME_CHARS: Final = 128

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_POSITION: Final = re.compile(r"\(byte (\d+)\)$")
_SURROGATE_PAIR_BYTES: Final = 12
_UNPAIRED_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)


class _Key:
    """A dict key that equals only itself, so that a dict of members keeps duplicates."""

    __slots__ = ()


_MEMBERS: Final = dict[_Key, Raw]


def members(body: bytes) -> list[tuple[str, Raw]]:
    """Unescaped name and value bytes of each top-level member, in order, duplicates kept.

    A value is a view that keeps the whole body alive. Raises ApiError when the body is not one JSON object.
    """
    names: list[str] = []

    def keep(_: type, name: str) -> _Key:
        if len(names) == MAX_MEMBERS or len(name) > MAX_NAME_CHARS:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"The body may have at most {MAX_MEMBERS} top-level members, "
                f"with names of at most {MAX_NAME_CHARS} characters.",
            )
        names.append(name)
        return _Key()

    try:
        values = msgspec.json.Decoder(_MEMBERS, dec_hook=keep).decode(body)
    except msgspec.ValidationError:
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise _invalid_json(_fault(body, str(error))) from None
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    return list(zip(names, values.values(), strict=True))


def _invalid_json(fault: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_JSON, f"The body is not valid JSON: {fault}.")


def _fault(body: bytes, parser_message: str) -> str:
    """The parser's finding in plainer words where it has a usual cause."""
    if not body or body.isspace():
        return "it is empty"
    if body.startswith(_BYTE_ORDER_MARK):
        return "it starts with a byte order mark; send UTF-8 without one"
    position = _POSITION.search(parser_message)
    at = int(position[1]) if position else len(body)
    if body.startswith((b"NaN", b"Infinity"), at):
        return f"NaN and Infinity are not JSON numbers (byte {at})"
    # The parser stops within a pair's length of the first half; a pair that begins later may be sound.
    nearby = max(0, at - _SURROGATE_PAIR_BYTES), at + _SURROGATE_PAIR_BYTES
    unpaired = _UNPAIRED_SURROGATE.search(body, *nearby)
    if unpaired and unpaired.start() <= at:
        return f"an unpaired surrogate is escaped in a string (byte {unpaired.start()})"
    return parser_message.removeprefix("JSON is malformed: ")
