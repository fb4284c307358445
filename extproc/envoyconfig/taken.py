"""Whether the Envoy on this machine has taken what was written for it."""

import asyncio
from typing import Final

import aiohttp

from extproc.envoyconfig.shapes import ROUTES

LIMIT_S: Final = 2.0
"""How long to wait: Envoy takes 20 ms unless it is starved."""
_ASK_EVERY_S: Final = 0.01
_WORKERS_S: Final = 0.03
"""From Envoy's main thread, which tells the version, to its workers."""
_QUERY: Final = {"type": "TextReadouts", "filter": rf"\.rds\.{ROUTES}\.version_text$"}


class NotTakenError(OSError):
    """Envoy runs, and still has older routes."""


async def await_routes(admin_port: int, version: str) -> None:
    """Return once Envoy has the routes of this version, or where no Envoy answers. Raises `NotTakenError`."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            async with asyncio.timeout(LIMIT_S):
                await _until(session, admin_port, version)
            await asyncio.sleep(_WORKERS_S)
        except aiohttp.ClientError:
            return  # it will read the file when it starts
        except TimeoutError:
            raise NotTakenError(0, f"Envoy has not taken the new routes within {LIMIT_S:g} s") from None


async def _until(session: aiohttp.ClientSession, admin_port: int, version: str) -> None:
    while True:
        async with session.get(f"http://127.0.0.1:{admin_port}/stats", params=_QUERY) as answer:
            if f'"{version}"' in await answer.text(errors="replace"):
                return
        await asyncio.sleep(_ASK_EVERY_S)
