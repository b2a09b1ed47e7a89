"""The headers of every answer of the pages, and the static files.

    /admin/static/<digest of all of them>/<name>

The digest is over the whole folder, so that modules import each other by their plain names and a
browser may keep every file for ever.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX: Final = "/admin"
STATIC_FOLDER: Final = Path(__file__).parents[1] / "static"
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
OF_PARTS: Final = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}
"""Of what is no document: the others say nothing of it, and are most of a small file's bytes."""
COMMON: Final = {
    **OF_PARTS,
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    # Not `no-referrer`: a form's Origin would be null.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}
PARTS: Final = ("text/css", "text/javascript", "application/javascript")
FOR_EVER: Final = "public, max-age=31536000, immutable"


class SecurityHeaders:
    """ASGI middleware: COMMON on every answer (OF_PARTS on style sheets and scripts), and
    `no-store` unless the answer says otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_part = headers.get("content-type", "").startswith(PARTS)
                headers.update(OF_PARTS if is_part else COMMON)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers)


class VersionedFiles(StaticFiles):
    """The static folder, below a digest of its content. Files are sent whole: the entity tag is the
    same for a file and for the file compressed, so parts of the two would be put together."""

    def __init__(self, folder: Path = STATIC_FOLDER) -> None:
        super().__init__(directory=folder)
        digest = hashlib.sha256()
        self._tags: dict[str, str] = {}
        for path in sorted(folder.iterdir()):
            tagged = FileResponse(path, stat_result=path.stat())
            self._tags[path.name] = tagged.headers["etag"]
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        self.version = digest.hexdigest()[:16]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        asked = [pair for pair in scope["headers"] if pair[0] != b"range"]
        await super().__call__({**scope, "headers": asked}, receive, send)

    def url(self, name: str) -> str:
        """Where a page finds it. Raises KeyError."""
        if name not in self._tags:
            raise KeyError(name)
        return f"{PREFIX}/static/{self.version}/{name}"

    def get_path(self, scope: Scope) -> str:
        """The file's name. Of another version there is none: the page that asks is an old one."""
        version, _, name = super().get_path(scope).partition(os.sep)
        if version != self.version:
            raise HTTPException(404)
        return name

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, to be kept for ever if it is still the one that the digest is of."""
        response = await super().get_response(path, scope)
        if response.headers.get("etag") == self._tags.get(path):
            response.headers["cache-control"] = FOR_EVER
        del response.headers["accept-ranges"]
        return response
