"""An API key in front of the reference server, as vLLM's ``--api-key`` asks for one."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RequireKey:
    """Lets through what carries ``Authorization: Bearer KEY``, and ``/health``; the rest is a 401.

    How long a comparison takes tells nothing about the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        content = {"error": {"message": "this server asks for its API key", "code": 401}}
        response = JSONResponse(content, 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
