"""Token-based access control for the viewer page.

A client sends the token in the HTTP header `Authorization` with the scheme Bearer. A browser opens
the page once as `/?token=TOKEN`; the response sets a cookie that later requests contain.
"""

import hashlib
import hmac

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "megatron_rl_viewer"
REFUSAL = "this page requires the token in its --token-file: open it once as /?token=TOKEN\n"


class TokenAccess:
    """Forwards requests that contain the token to the application; rejects all others with 401."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = hashlib.sha256(self._token).hexdigest().encode()
        """Value of the cookie: a digest of the token.

        A cookie cannot contain all characters that a token may have.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request, or forward the request to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        answer = self._answer(Request(scope)) if scope["type"] == "http" else PlainTextResponse(REFUSAL, 401)
        await (answer or self._app)(scope, receive, send)

    def _answer(self, request: Request) -> Response | None:
        """Return the response to a request, or None if the request is to be forwarded."""
        if hmac.compare_digest(request.query_params.get("token", "").encode(), self._token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self._cookie.decode(), httponly=True, samesite="strict")
            return answer
        said = request.headers.get("authorization", "").encode()
        cookie = request.cookies.get(COOKIE, "").encode()
        if hmac.compare_digest(said, b"Bearer " + self._token) or hmac.compare_digest(cookie, self._cookie):
            return None
        return PlainTextResponse(REFUSAL, 401, headers={"WWW-Authenticate": "Bearer"})
