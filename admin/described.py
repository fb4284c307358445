"""What a handler says of itself, for the OpenAPI document."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from admin.errors import Handler
from extproc.openai.errors import ErrorCode, ErrorType

Described = TypeVar("Described", bound=Handler)


@dataclass(slots=True, frozen=True, kw_only=True)
class Description:
    """An operation. `answer`: what is encoded as JSON, or the content type of what is not.

    `query`: the schema of each parameter; `body`: that of the request's body. `refusals` leaves out those of
    the admin key, which the path tells.
    """

    summary: str
    answer: Any
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    refusals: tuple[ErrorCode, ...] = ()


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `code` is for programs."""

    message: str
    type: ErrorType
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every error, in the shape that OpenAI clients expect."""

    error: ErrorDetail


class Done(msgspec.Struct, frozen=True):
    """A probe's answer."""

    status: str


_DESCRIPTIONS: dict[Handler, Description] = {}


def described(
    summary: str, answer: Any, *refusals: ErrorCode, **more: Any
) -> Callable[[Described], Described]:
    """Describe the handler below (see `Description`)."""

    def keep(handler: Described) -> Described:
        _DESCRIPTIONS[handler] = Description(summary=summary, answer=answer, refusals=refusals, **more)
        return handler

    return keep


def description(route: web.AbstractRoute) -> Description | None:
    """What the route's handler says of itself; `None`: nothing, as a page for people."""
    return _DESCRIPTIONS.get(route.handler)
