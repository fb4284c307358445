"""What Envoy tells, of a server that answers as its admin does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from extproc.envoyconfig import told
from extproc.envoyconfig.told import NotTakenError, await_routes, failed_open_requests


@asynccontextmanager
async def envoy_admin(*versions: str) -> AsyncIterator[int]:
    """The port of an admin that tells one version after the other, and the last for good."""
    left = list(versions)

    async def stats(request: web.Request) -> web.Response:
        assert request.query["filter"] == r"\.rds\.inferact\.version_text$"
        version = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(text=f'http.inferact.rds.inferact.version_text: "{version}"\n')

    app = web.Application()
    app.router.add_get("/stats", stats)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_it_returns_once_envoy_tells_the_version() -> None:
    async with envoy_admin("old", "old", "new") as port:
        async with asyncio.timeout(told.LIMIT_S):
            await await_routes(port, "new")


async def test_it_says_so_where_envoy_stays_with_older_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "LIMIT_S", 0.1)
    async with envoy_admin("old", "newer") as port:
        with pytest.raises(NotTakenError, match=r"not taken the new routes"):
            await await_routes(port, "new")


async def test_it_waits_for_no_envoy_that_is_not_there() -> None:
    async with envoy_admin("old") as port:
        pass
    async with asyncio.timeout(told.LIMIT_S):
        await await_routes(port, "new")


async def test_where_no_envoy_is_nothing_failed_open() -> None:
    async with envoy_admin("old") as port:
        pass
    assert await failed_open_requests(port) == 0
