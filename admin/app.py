"""The admin app: its endpoints, and who may call them."""

import asyncio

from aiohttp import web
from aiohttp.hdrs import SERVER

from admin import decisions, models, nodes, quarantine, reload
from admin.auth import admin_key_required
from admin.context import CONTEXT, AdminContext, json_answer
from admin.dashboard import dashboard_routes
from admin.described import Done, described
from admin.errors import openai_errors
from admin.listen import ListenError, start_admin
from admin.openapi import openapi
from admin.status import FleetStatus, fleet_status
from extproc import telemetry
from extproc.openai.errors import ApiError, ErrorCode

__all__ = ["AdminContext", "ListenError", "make_app", "start_admin"]

_RETRY_AFTER_S = 1


def make_app(context: AdminContext) -> web.Application:
    """The app, which `start_admin` serves. Everything under `/admin/` needs the admin key."""
    app = web.Application(middlewares=[openai_errors])
    app[CONTEXT] = context
    app.on_response_prepare.append(_name_the_server)
    app.router.add_get("/status", _status)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/health", _readyz)  # as engines call it: load tools and clients of theirs ask for it
    app.router.add_routes(dashboard_routes())
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{id:.+}", models.get_model)
    app.add_subapp("/admin/", _keyed())
    return app


def _keyed() -> web.Application:
    app = web.Application(middlewares=[admin_key_required])
    app.router.add_post("/nodes/{id}/drain", nodes.drain)
    app.router.add_post("/nodes/{id}/restore", nodes.restore)
    app.router.add_post("/reload", reload.reload)
    app.router.add_get("/quarantine", quarantine.list_prompts)
    app.router.add_delete("/quarantine/{key}", quarantine.release)
    app.router.add_get("/decisions", decisions.list_decisions)
    app.router.add_get("/decisions/{request_id:.+}", decisions.get_decision)
    app.router.add_post("/explain", decisions.explain)
    app.router.add_get("/openapi.json", openapi)
    return app


async def _name_the_server(_: web.Request, response: web.StreamResponse) -> None:
    """Without the versions that aiohttp would tell."""
    response.headers[SERVER] = "inferact"


@described("Every node, and the service itself.", FleetStatus)
async def _status(request: web.Request) -> web.Response:
    context = request.config_dict[CONTEXT]
    return json_answer(await asyncio.to_thread(fleet_status, context))  # sorting latencies takes its time


@described("Metrics in Prometheus' text format.", "text/plain")
async def _metrics(request: web.Request) -> web.Response:
    text = await asyncio.to_thread(request.config_dict[CONTEXT].telemetry.render)
    return web.Response(body=text, headers={"Content-Type": telemetry.CONTENT_TYPE})


@described("The process lives.", Done)
async def _healthz(_: web.Request) -> web.Response:
    return json_answer(Done("ok"))


@described("It can route requests.", Done, ErrorCode.NO_AVAILABLE_NODE)
async def _readyz(request: web.Request) -> web.Response:
    obstacle = request.config_dict[CONTEXT].ready()
    if obstacle is not None:
        raise ApiError(ErrorCode.NO_AVAILABLE_NODE, f"Not ready: {obstacle}.", retry_after_s=_RETRY_AFTER_S)
    return json_answer(Done("ready"))
