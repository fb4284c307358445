"""The dashboard at `/dashboard`: files of this package, under headers that let nothing else in."""

from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

_FILES: Final = Path(__file__).parent / "static"
_PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes() -> list[web.RouteDef]:
    """A route for each file, all of which are read now; the page itself needs no name."""
    handlers = {path.name: _handler(path) for path in _FILES.iterdir() if path.suffix in _TYPES}
    routes = [web.get(f"/dashboard/{name}", handler) for name, handler in handlers.items()]
    return [*routes, *(web.get(path, handlers[_PAGE]) for path in ("/dashboard", "/dashboard/"))]


def _handler(path: Path) -> Handler:
    text, content_type = path.read_text(encoding="utf-8"), _TYPES[path.suffix]

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, headers=_HEADERS)

    return serve
