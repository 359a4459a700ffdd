"""Web server of the viewer page; it answers requests with data and images from files.

Data is sent as JSON. The server writes no files and starts no program except the token decoder.

Model output is treated as data throughout. The page inserts it as text (static/ has no innerHTML).
The content security policy allows only scripts from the page's own files.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.trustedhost import TrustedHostMiddleware

from megatron_rl.io.rollout_codec import IMAGE_KEY_PATTERN
from megatron_rl.observe.viewer import page_data
from megatron_rl.observe.viewer.overview import make_overview
from megatron_rl.observe.viewer.page_data import DecoderCache, RolloutPageQuery
from megatron_rl.observe.viewer.store import RunFolder
from megatron_rl.observe.viewer.token_access import TokenAccess

STATIC = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
OTHER_SITES = ("cross-site", "same-site")
"""Values of the header Sec-Fetch-Site in requests from pages of other sites.

Such requests are rejected unless they result from following a link.
"""


def create_app(folders: Mapping[str, RunFolder], *, hosts: list[str], token: str = "") -> FastAPI:
    """Return the web application.

    Args:
        folders: run directories by label.
        hosts: accepted host names. A request with any other host name may come from a foreign web
            page with a domain that resolves to this machine (DNS rebinding).
        token: secret that every request must contain; "" if only this machine can reach the page.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if token:
        app.add_middleware(TokenAccess, token=token)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.middleware("http")(_add_security_headers)
    app.exception_handler(MemoryError)(_out_of_memory)
    app.include_router(_run_routes(folders))
    app.include_router(_rollout_routes(folders))
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _find_run(folders: Mapping[str, RunFolder], run: str) -> RunFolder:
    if run not in folders:
        raise HTTPException(404, f"no run with this name: {run[:80]!r}")
    return folders[run]


def _run_routes(folders: Mapping[str, RunFolder]) -> APIRouter:
    """Return the routes with data of whole runs."""
    routes = APIRouter()

    @routes.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        return [page_data.run_summary(name, each) for name, each in folders.items()]

    @routes.get("/api/overview")
    def overview() -> dict[str, Any]:
        return page_data.to_json_value(make_overview(folders))

    @routes.get("/api/curves")
    def curves(run: str) -> list[dict[str, float | None]]:
        return page_data.curve_lines(_find_run(folders, run))

    @routes.get("/api/examples")
    def examples(run: str) -> list[dict[str, Any]]:
        return page_data.example_rows(_find_run(folders, run))

    return routes


def _rollout_routes(folders: Mapping[str, RunFolder]) -> APIRouter:
    """Return the routes with data and images of rollouts."""
    routes, decoders = APIRouter(), DecoderCache()

    @routes.get("/api/rollouts")
    def rollouts(asked: Annotated[RolloutPageQuery, Query()]) -> dict[str, Any]:
        return page_data.rollout_page(asked, _find_run(folders, asked.run))

    @routes.get("/api/group")
    def group(run: str, step: int, group: int) -> dict[str, Any]:
        folder = _find_run(folders, run)
        return _read_or_404(lambda: page_data.group_data(folder, step, group))

    @routes.get("/api/episode")
    def episode(run: str, step: int, row_index: int) -> dict[str, Any]:
        folder = _find_run(folders, run)
        decoder = decoders.get_decoder(folder)
        return _read_or_404(lambda: page_data.episode_data(folder, step, row_index, decoder))

    @routes.get("/picture/{run:path}/{key}.png")
    def picture(run: str, key: str) -> Response:
        content = _find_run(folders, run).read_image(key) if IMAGE_KEY_PATTERN.fullmatch(key) else None
        if content is None:
            raise HTTPException(404, "no such image")
        return Response(content, media_type="image/png")

    return routes


async def _add_security_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    is_embedded = request.headers.get("sec-fetch-site") in OTHER_SITES and request.headers.get("sec-fetch-mode") != "navigate"
    response = Response("requests from other pages are rejected", 403) if is_embedded else await call(request)
    response.headers.update(SECURITY_HEADERS)
    return response


def _out_of_memory(request: Request, error: Exception) -> Response:
    return Response("reading this requires more memory than --memory-gb", 503, headers=SECURITY_HEADERS)


def _read_or_404(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except (ValueError, OSError, KeyError) as error:
        raise HTTPException(404, " ".join(str(error).split())[:400]) from error
