"""Reload: reading the configuration file again."""

from typing import Final

from aiohttp import web

from admin.context import CONTEXT, json_answer
from admin.described import described
from extproc.config.difference import Difference
from extproc.openai.errors import ApiError, ErrorCode
from extproc.reload import ReloadError

_FLAGS: Final = {"true": True, "false": False}


@described(
    "Reads the configuration file again; the answer is what differs.",
    Difference,
    *(ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FOUND, ErrorCode.INVALID_CONFIGURATION),
    query={"dry_run": {"enum": ["true", "false"], "default": "false"}},
)
async def reload(request: web.Request) -> web.Response:
    """`POST /admin/reload?dry_run=true`: what differs, which is in force now unless it is a dry run.

    Raises `ApiError`: the file is refused as a whole, and nothing has changed.
    """
    reloader = request.config_dict[CONTEXT].reloader
    dry_run = _FLAGS.get(request.query.get("dry_run", "false"))
    if dry_run is None:
        message = "`dry_run` must be true or false."
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="dry_run")
    if reloader is None:
        message = "The service was started without a configuration file."
        raise ApiError(ErrorCode.NOT_FOUND, message)
    try:
        return json_answer(await reloader.reload(dry_run))
    except ReloadError as error:
        raise ApiError(ErrorCode.INVALID_CONFIGURATION, "\n".join(error.reasons)) from None
