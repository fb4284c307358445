"""Prompts that engines died of: which are kept from the nodes, and letting one out."""

import logging

import msgspec
from aiohttp import web

from admin.context import CONTEXT, json_answer
from admin.described import described
from extproc.openai.errors import ApiError, ErrorCode, shown

logger = logging.getLogger(__name__)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in quarantine. `key` tells nothing of its text; `seconds_left` until it is let out."""

    key: str
    nodes: tuple[str, ...]
    seconds_left: float


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts in quarantine."""

    prompts: list[Prompt]


@described("Prompts that engines died of.", Prompts)
async def list_prompts(request: web.Request) -> web.Response:
    """`GET /admin/quarantine`."""
    context = request.config_dict[CONTEXT]
    held = context.router.quarantine.listed(context.clock())
    prompts = [Prompt(key=one.key, nodes=one.nodes, seconds_left=round(one.left_s, 1)) for one in held]
    return json_answer(Prompts(prompts=prompts))


@described("Let a prompt out; those that are left.", Prompts, ErrorCode.NOT_FOUND)
async def release(request: web.Request) -> web.Response:
    """`DELETE /admin/quarantine/{key}`: nodes may get the prompt again. Raises `ApiError` for other keys."""
    key = request.match_info["key"]
    if not request.config_dict[CONTEXT].router.quarantine.clear(key):
        message = f"No prompt `{shown(key)}` is in quarantine: see GET /admin/quarantine."
        raise ApiError(ErrorCode.NOT_FOUND, message)
    logger.info("the prompt %s was let out of quarantine", key)
    return await list_prompts(request)
