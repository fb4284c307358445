"""Errors in the shape that OpenAI clients expect."""

from enum import StrEnum
from http import HTTPStatus
from typing import Self

import msgspec

_SHOWN_CHARS = 200


class ErrorType(StrEnum):
    """The coarse kind of an error, which OpenAI clients read as `error.type`."""

    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    RATE_LIMIT = "rate_limit_error"
    SERVER = "server_error"


class ErrorCode(StrEnum):
    """What went wrong (`error.code`), with the HTTP status and the OpenAI type it is answered with."""

    status: HTTPStatus
    type: ErrorType

    def __new__(cls, code: str, status: HTTPStatus, error_type: ErrorType) -> Self:
        """Make the member equal to its code string."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.status = status
        member.type = error_type
        return member

    INVALID_JSON = "invalid_json", HTTPStatus.BAD_REQUEST, ErrorType.INVALID_REQUEST
    INVALID_REQUEST = "invalid_request", HTTPStatus.BAD_REQUEST, ErrorType.INVALID_REQUEST
    INVALID_HINT = "invalid_hint", HTTPStatus.BAD_REQUEST, ErrorType.INVALID_REQUEST
    ADMIN_KEY_REQUIRED = "admin_key_required", HTTPStatus.UNAUTHORIZED, ErrorType.AUTHENTICATION
    ADMIN_KEY_INVALID = "admin_key_invalid", HTTPStatus.FORBIDDEN, ErrorType.AUTHENTICATION
    MODEL_NOT_FOUND = "model_not_found", HTTPStatus.NOT_FOUND, ErrorType.INVALID_REQUEST
    NOT_FOUND = "not_found", HTTPStatus.NOT_FOUND, ErrorType.INVALID_REQUEST
    METHOD_NOT_ALLOWED = "method_not_allowed", HTTPStatus.METHOD_NOT_ALLOWED, ErrorType.INVALID_REQUEST
    BODY_TOO_LARGE = "body_too_large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ErrorType.INVALID_REQUEST
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported_media_type",
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        ErrorType.INVALID_REQUEST,
    )
    INVALID_CONFIGURATION = (
        "invalid_configuration",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        ErrorType.INVALID_REQUEST,
    )
    POISONOUS_REQUEST = "poisonous_request", HTTPStatus.UNPROCESSABLE_ENTITY, ErrorType.INVALID_REQUEST
    QUEUE_FULL = "queue_full", HTTPStatus.TOO_MANY_REQUESTS, ErrorType.RATE_LIMIT
    NO_AVAILABLE_NODE = "no_available_node", HTTPStatus.SERVICE_UNAVAILABLE, ErrorType.SERVER
    NODE_UNAVAILABLE = "node_unavailable", HTTPStatus.SERVICE_UNAVAILABLE, ErrorType.SERVER
    ADMIN_DISABLED = "admin_disabled", HTTPStatus.SERVICE_UNAVAILABLE, ErrorType.SERVER
    REQUEST_TIMEOUT = "request_timeout", HTTPStatus.GATEWAY_TIMEOUT, ErrorType.SERVER


class ApiError(Exception):
    """A refusal to be answered to the client; the message must not repeat prompts, keys or tokens."""

    def __init__(
        self, code: ErrorCode, message: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body of the answer: `{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.code.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def shown(name: str) -> str:
    """A client's name for something, safe in a message: its first 200 characters, unprintables escaped."""
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:_SHOWN_CHARS])
    return safe if len(name) <= _SHOWN_CHARS else f"{safe}…"
