"""What the Envoy on this machine tells at its admin port."""

import asyncio
import re
from typing import Final

import aiohttp

from extproc import headers
from extproc.envoyconfig.shapes import ROUTES

LIMIT_S: Final = 2.0
"""How long to wait: Envoy takes new routes within 20 ms unless it is starved."""
CLUSTERS_LIMIT_S: Final = 10.0
"""The same for clusters, which are ready once their names have been looked up, or could not be."""
_ASK_EVERY_S: Final = 0.01
_WORKERS_S: Final = 0.03
"""From Envoy's main thread, which tells the version, to its workers."""
_VERSION: Final = {"type": "TextReadouts", "filter": rf"\.rds\.{ROUTES}\.version_text$"}
_CLUSTERS: Final = {"filter": r"^cluster_manager\.(cds\.version_text|warming_clusters)$"}
_FAILED_OPEN: Final = {"filter": rf"^vhost\.{ROUTES}\.route\.{headers.FAIL_OPEN}\.upstream_rq_total$"}
_COUNT: Final = re.compile(r": (\d+)$", re.MULTILINE)


class NotTakenError(OSError):
    """Envoy runs, and still has older routes or clusters."""


async def await_routes(admin_port: int, version: str) -> None:
    """Return once Envoy has the routes of this version, or where no Envoy answers. Raises `NotTakenError`."""
    await _until_told(admin_port, _VERSION, f'"{version}"', "routes", LIMIT_S)


async def await_clusters(admin_port: int, version: str) -> None:
    """The same for clusters, all of them ready."""
    told = rf'version_text: "{version}"\n(.*\n)*.*warming_clusters: 0\n'
    await _until_told(admin_port, _CLUSTERS, told, "clusters", CLUSTERS_LIMIT_S)


async def failed_open_requests(admin_port: int) -> int:
    """How many requests Envoy has routed by itself since it started; 0 where no Envoy answers."""
    async with _session() as session:
        try:
            told = await _stats(session, admin_port, _FAILED_OPEN)
        except (aiohttp.ClientError, TimeoutError):
            return 0
    return sum(map(int, _COUNT.findall(told)))


async def _until_told(admin_port: int, query: dict[str, str], wanted: str, what: str, limit_s: float) -> None:
    """Return once what Envoy tells matches `wanted`, and its workers know as well."""
    async with _session() as session:
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    if re.search(wanted, await _stats(session, admin_port, query)):
                        break
                    await asyncio.sleep(_ASK_EVERY_S)
            await asyncio.sleep(_WORKERS_S)
        except aiohttp.ClientError:
            return  # it will read the file when it starts
        except TimeoutError:
            raise NotTakenError(0, f"Envoy has not taken the new {what} within {limit_s:g} s") from None


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))


async def _stats(session: aiohttp.ClientSession, admin_port: int, query: dict[str, str]) -> str:
    async with session.get(f"http://127.0.0.1:{admin_port}/stats", params=query) as answer:
        return await answer.text(errors="replace")
