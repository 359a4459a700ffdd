r"""Access control for the vLLM servers that a run starts or uses.

    MEGATRON_RL_TOKEN_FILE=FILE python -m vllm.entrypoints.openai.api_server ... \
        --middleware megatron_rl.rollout.vllm.http_gate.Gate

The middleware applies the checks of sandbox/access.py to every route, and allows only one worker
method to be called by RPC. vLLM's own API key protects only /v1, /v2, /inference and /cohere
(0.32.0, entrypoints/serve/middleware/authenticate.py). Without this gate, any client that reaches
the port could pause the engine, replace its weights and call any method of its worker, including a
method that writes files.
"""

import json
import os

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_rl_sandbox.access import AccessRules, RequestRejection
from megatron_rl_sandbox.request_gate import MIN_BODY_BYTES, replay_body, send_rejection
from megatron_rl_sandbox.token import read_token

TOKEN_FILE = "MEGATRON_RL_TOKEN_FILE"
"""Environment variable that contains the path of the server's token file."""
MIDDLEWARE = f"{__name__}.Gate"
ALLOWED_RPC = {"method": "rl_fingerprint"}
"""The only request body that /collective_rpc accepts. rollout/vllm/server_api.py sends this body.
"""


class Gate:
    """ASGI middleware that checks every request.

    The server does not start without a token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._rules: AccessRules  # set by `_start`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on to vLLM, or reject it."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._rules.check_request(scope)) is not None:
            await send_rejection(refusal, scope, receive, send)
        elif scope["path"].rstrip("/").endswith("/collective_rpc"):
            await self._call_worker(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the token before the server accepts requests."""
        try:
            token = read_token(os.environ.get(TOKEN_FILE, ""))
        except ValueError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"{TOKEN_FILE}={error}"})
            return
        self._rules = AccessRules(token=token, hosts=[scope["app"].state.args.host or ""])
        await self.app(scope, receive, send)

    async def _call_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) <= MIN_BODY_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            is_allowed = len(body) <= MIN_BODY_BYTES and json.loads(body) == ALLOWED_RPC
        except ValueError:
            is_allowed = False
        if is_allowed:
            await self.app(scope, replay_body(body, receive), send)
        else:
            await send_rejection(RequestRejection(403, f"the only accepted body is {json.dumps(ALLOWED_RPC)}"), scope, receive, send)
