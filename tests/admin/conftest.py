"""The real admin app, served to aiohttp's client."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from admin_app import App
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from admin.app import make_app


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    app = App(tmp_path / "drains.sqlite")
    web_app = make_app(app.context)
    web_app.router.add_post("/probe/body", _read_body)
    web_app.router.add_get("/probe/crash", _crash)
    async with TestClient(TestServer(web_app)) as app.client:
        yield app


async def _read_body(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _crash(_: web.Request) -> web.Response:
    raise RuntimeError("a secret of the code")
