"""Every error of the admin app in the shape that OpenAI clients expect."""

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.hdrs import ALLOW, RETRY_AFTER

from extproc import headers
from extproc.openai.errors import ApiError, ErrorCode, ErrorType

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_INTERNAL = "internal_error"
_REFUSALS = {
    HTTPStatus.NOT_FOUND: (ErrorCode.NOT_FOUND, "There is nothing at this path."),
    HTTPStatus.METHOD_NOT_ALLOWED: (ErrorCode.METHOD_NOT_ALLOWED, "This path does not take this method."),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (ErrorCode.BODY_TOO_LARGE, "The body is too large."),
}
_MALFORMED = (ErrorCode.INVALID_REQUEST, "The request is malformed.")


class FailedError(Exception):
    """The service could not do what was asked (500); unlike other failures, the message is for the caller."""


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever is raised into an answer; what is no refusal is logged and told without detail."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error)
    except web.HTTPException as error:
        response = _refusal(ApiError(*_REFUSALS.get(HTTPStatus(error.status), _MALFORMED)))
        if ALLOW in error.headers:
            response.headers[ALLOW] = error.headers[ALLOW]
        return response
    except FailedError as error:
        logger.error("%s", error)
        return _failed(str(error))
    except Exception:
        logger.exception("a request to the admin app failed")
        return _failed("The service failed to answer this; its log says why.")


def _refusal(error: ApiError) -> web.Response:
    response = _json(error.code.status, error.code.value, error.body())
    if error.retry_after_s is not None:
        response.headers[RETRY_AFTER] = str(error.retry_after_s)
    return response


def _failed(message: str) -> web.Response:
    error = {"message": message, "type": ErrorType.SERVER, "param": None, "code": _INTERNAL}
    return _json(HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL, msgspec.json.encode({"error": error}))


def _json(status: HTTPStatus, reason: str, body: bytes) -> web.Response:
    return web.Response(
        status=status, body=body, content_type="application/json", headers={headers.REASON: reason}
    )
