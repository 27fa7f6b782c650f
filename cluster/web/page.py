"""The gateway's web page: the live fleet, and a playground to chat, race and complete in.

Its files are static; all data comes from the API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SCRIPTS = (
    *("app.js", "api.js", "dom.js", "fleet.js"),
    *("playground.js", "options.js", "activity.js", "run.js", "chat.js", "markdown.js", "race.js", "complete.js"),
)
FILES = {"/": "index.html"} | {f"/web/{name}": name for name in ("style.css", "icon.svg", *SCRIPTS)}
# Even if generated text got into the markup, it could run no script and load nothing.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_web_page(app: FastAPI) -> None:
    """Serve the page at / and its files under /web."""
    for path, name in FILES.items():
        app.add_route(path, _sender(FOLDER / name), include_in_schema=False)


def _sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, media_type=MEDIA_TYPES[file.suffix], headers=HEADERS)

    return send
