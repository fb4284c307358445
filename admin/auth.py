"""The admin key: who may change the fleet."""

import hmac
import logging

from aiohttp import web

from admin.context import CONTEXT
from admin.errors import Handler
from extproc import headers
from extproc.openai.errors import ApiError, ErrorCode

logger = logging.getLogger(__name__)


@web.middleware
async def admin_key_required(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request pass only with the admin key."""
    try:
        check_admin_key(request.headers.get(headers.ADMIN_KEY), request.config_dict[CONTEXT].admin_key)
    except ApiError as error:
        logger.warning("an admin call was refused: %s", error.code.value)
        raise
    return await handler(request)


def check_admin_key(given: str | None, key: str | None) -> None:
    """Compare in constant time. Raises `ApiError`, which names no key."""
    if not key:
        message = (
            "Admin calls are off: start the service with INFERACT_ADMIN_KEY or INFERACT_ADMIN_KEY_FILE set."
        )
        raise ApiError(ErrorCode.ADMIN_DISABLED, message)
    if not given:
        raise ApiError(ErrorCode.ADMIN_KEY_REQUIRED, f"Send the admin key in the header {headers.ADMIN_KEY}.")
    if not hmac.compare_digest(_bytes(given), _bytes(key)):
        raise ApiError(ErrorCode.ADMIN_KEY_INVALID, f"The key in {headers.ADMIN_KEY} is not the admin key.")


def _bytes(key: str) -> bytes:
    """The key as it was sent: aiohttp carries bytes that are not UTF-8 as surrogates."""
    return key.encode("utf-8", "surrogateescape")
