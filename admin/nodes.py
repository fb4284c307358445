"""Drain and restore: taking a node out of routing, and putting it back."""

import logging

from aiohttp import web

from admin.context import CONTEXT, AdminContext, json_answer
from admin.described import described
from admin.errors import FailedError
from admin.status import NodeStatus, node_status
from extproc.drains import DrainStoreError
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.routing.node import Node

logger = logging.getLogger(__name__)


@described("Send a node no new requests; running ones end.", NodeStatus, ErrorCode.NOT_FOUND)
async def drain(request: web.Request) -> web.Response:
    """`POST /admin/nodes/{id}/drain`: no new requests for the node; its state, once Envoy knows."""
    return await _set_drained(request, True)


@described("Send a drained node requests again.", NodeStatus, ErrorCode.NOT_FOUND)
async def restore(request: web.Request) -> web.Response:
    """`POST /admin/nodes/{id}/restore`: new requests again; the node's state, once Envoy knows."""
    return await _set_drained(request, False)


async def _set_drained(request: web.Request, drained: bool) -> web.Response:
    context = request.config_dict[CONTEXT]
    node_id = request.match_info["id"]
    node = context.router.nodes.get(node_id)
    if node is None:
        known = ", ".join(context.router.nodes)
        raise ApiError(ErrorCode.NOT_FOUND, f"There is no node `{shown(node_id)}`. The nodes are: {known}.")
    node.drained = drained  # with no await before it: no decision from here on names a drained node
    logger.info("node %s is %s", node_id, "drained" if drained else "restored")
    async with context.drain_lock:
        await _settle(context, node, drained)
    return json_answer(node_status(node, context.clock(), context.router.split))


async def _settle(context: AdminContext, node: Node, drained: bool) -> None:
    """Make a drain or restore last, and tell Envoy.

    It holds even where it cannot be made to last (`FailedError` says so): the operator wants the node out of
    traffic, or back, and the same call can be repeated.
    """
    remember = context.drains.drain if drained else context.drains.restore
    faults = []
    try:
        await remember(node.id)
    except DrainStoreError as error:
        faults.append(f"a restart undoes that: {error}")
    try:
        await context.on_drain_change()
    except OSError as error:
        faults.append(f"Envoy does not know of it, should the scheduler be away: {error.strerror}.")
    if faults:
        state = "drained" if drained else "restored"
        what = " And ".join(faults)
        raise FailedError(f"The node `{node.id}` is {state} now, but {what} Mend that and repeat this call.")
