"""Code that the listener and speaker servers share: command line, application and shutdown.

The environment variables INFERENCE_CONCURRENCY, INFERENCE_ACQUIRE_TIMEOUT and LISTENER_BATCH_SIZE
set command-line defaults. If DEBUG_MODE is true, LOG_PATH sets the default of --log. The names of
the variables are the same as in the original services of the Lewis game. No other module reads
these variables.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import ClientDisconnect
from starlette.types import ExceptionHandler

from megatron_rl.config import EngineSettings, ModelSettings, require
from megatron_rl.tasks.lewis.listener_protocol import MAX_CANDIDATES, MAX_ITEMS
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits
from megatron_rl.tasks.lewis.server.weight_updates import WeightPart, WeightUpdateHandler
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import (
    NO_DOC_PAGES,
    handle_disconnect,
    handle_http_error,
    open_listener,
    openapi_body,
    reserve_connections,
    serve_until_signal,
)
from megatron_rl_sandbox.request_gate import MIN_BODY_BYTES, RequestGuardMiddleware
from megatron_rl_sandbox.token import read_token

EXTRA_DESCRIPTORS = 128
"""Number of file descriptors that are reserved for the engine, the renderer's threads and the log.
"""
MAX_JSON_DELIMITERS = MIN_BODY_BYTES + 64 * MAX_ITEMS * MAX_CANDIDATES
TRUE_VALUES = ("1", "true", "yes", "on")


def make_application(
    title: str, *, limits: RequestLimits, large_body_routes: Sequence[str], token: str, receiver: WeightUpdateHandler | None, host: str = ""
) -> FastAPI:  # fmt: skip
    """Return a FastAPI application with limits and access control.

    The application has the route /weights if weight updates are enabled. The caller adds all other
    routes.

    Args:
        title: Title of the application.
        limits: Limits on requests.
        large_body_routes: Names of routes that accept bodies of up to `limits.body_bytes`.
        token: Access token. An empty string disables authentication (sandbox/request_gate.py).
        receiver: Handler of the route /weights. None disables weight updates.
        host: Host name that requests may use in addition to the default names
            (sandbox/request_gate.py).
    """
    app = FastAPI(title=title, redirect_slashes=False, **NO_DOC_PAGES)
    app.add_middleware(
        RequestGuardMiddleware,
        max_body_bytes=dict.fromkeys((*large_body_routes, "weights"), limits.body_bytes),
        max_delimiters=MAX_JSON_DELIMITERS,
        token=token,
        hosts=[host],
    )
    if receiver is not None:
        app.post("/weights", openapi_extra=openapi_body(WeightPart))(receiver.handle_weight_part)
    app.add_exception_handler(StarletteException, cast(ExceptionHandler, handle_http_error))
    app.add_exception_handler(ClientDisconnect, cast(ExceptionHandler, handle_disconnect))
    return app


def build_parser(description: str | None, *, port: int, variables: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the command-line parser, with defaults from the environment `variables`."""
    log = variables.get("LOG_PATH") if variables.get("DEBUG_MODE", "").casefold() in TRUE_VALUES else None
    own = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--model", required=True, help="folder of the model in Hugging Face format")
    own.add_argument(
        "--host", default="127.0.0.1", help="host to listen on; a non-loopback host requires --token-file (default %(default)s)"
    )
    own.add_argument("--port", type=int, default=port, help="port to listen on; 0 selects any free port (default %(default)s)")
    own.add_argument("--token-file", type=Path, help="file with the token that clients must send")
    own.add_argument(
        "--name", default="", help="server name that /health reports; runs use it to detect a different server at the same URL"
    )
    own.add_argument(
        "--root",
        action="append",
        default=[],
        help="folder from which images may be read (repeatable); relative paths are resolved against the first folder",
    )
    own.add_argument(
        "--concurrency",
        type=int,
        default=variables.get("INFERENCE_CONCURRENCY", 8),
        help="maximum number of requests in progress (default %(default)s)",
    )
    own.add_argument(
        "--acquire-timeout",
        type=float,
        default=variables.get("INFERENCE_ACQUIRE_TIMEOUT", 300.0),
        help="maximum number of seconds that a request waits for a slot",
    )
    own.add_argument("--timeout", type=float, default=120.0, help="time limit for processing a request, in seconds (default %(default)g)")
    own.add_argument("--body-mib", type=float, default=64.0, help="maximum size of a request body, in MiB (default %(default)g)")
    own.add_argument(
        "--batch-size", type=int, default=variables.get("LISTENER_BATCH_SIZE", 64), help="maximum number of prompts in a forward pass"
    )
    own.add_argument(
        "--min-pixels", type=int, default=3136, help="minimum number of pixels in an image after resizing (default %(default)s)"
    )
    own.add_argument(
        "--max-pixels", type=int, default=401408, help="maximum number of pixels in an image after resizing (default %(default)s)"
    )
    own.add_argument(
        "--max-model-len", type=int, default=4096, help="maximum number of tokens in a prompt, including image tokens (default %(default)s)"
    )
    own.add_argument("--dtype", default="float32", help="data type of the weights: float32 (default) or bfloat16")
    own.add_argument("--kv-cache-mib", type=int, default=256, help="size of the KV cache on a CPU, in MiB (default %(default)s)")
    own.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="fraction of the GPU memory that the engine uses (default %(default)s)"
    )
    own.add_argument("--trained", action="store_true", help="accept weights from the run that trains this model (weight_publish.urls)")
    own.add_argument("--log", type=Path, default=log, help="JSON-lines file to which every response is written")
    return own


def run_server(name: str, make_app: Callable[..., FastAPI], *, description: str | None, port: int, arguments: Sequence[str] | None) -> int:
    """Run a server until a shutdown signal arrives.

    Args:
        name: Name of the server in error messages.
        make_app: Function that returns the application. The function is called with (engine, image
            cache, limits=, name=, log=, token=, receiver=, host=).
        description: Description of the program that --help prints.
        port: Default port.
        arguments: Command-line arguments. None selects the arguments of the process.

    Returns:
        The exit status: 0 after a requested shutdown, 1 after an invalid argument or an OS error.
    """
    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder  # imports torch and vLLM

    words = build_parser(description, port=port, variables=os.environ).parse_args(arguments)
    try:
        limits = RequestLimits(
            concurrency=words.concurrency, acquire_s=words.acquire_timeout, timeout_s=words.timeout, body_bytes=int(words.body_mib * 2**20)
        )
        remedy = "lets anyone who reaches the port replace the model; also pass --token-file FILE"
        require(not words.trained or words.token_file is not None, "--trained", words.trained, remedy)
        token = read_token(words.token_file) if words.token_file else ""
        model = ModelSettings(path=words.model, min_pixels=words.min_pixels, max_pixels=words.max_pixels)
        settings = EngineSettings(
            dtype=words.dtype, kv_cache_mib=words.kv_cache_mib, gpu_memory_utilization=words.gpu_memory_utilization,
            max_model_len=words.max_model_len, max_num_seqs=words.batch_size, max_images=1,
        )  # fmt: skip
        pictures = ImageCache(words.root)
        with open_listener(words.host, words.port, token=token, permits="ask the model") as listener:
            line = ConnectionRegistry(
                max_connections=reserve_connections(EXTRA_DESCRIPTORS, max_connections=ConnectionRegistry().max_connections)
            )
            engine = EngineHolder(model, settings)
            try:
                receiver = WeightUpdateHandler(engine) if words.trained else None
                app = make_app(
                    engine, pictures, limits=limits, name=words.name, log=words.log, token=token, receiver=receiver, host=words.host
                )
                asyncio.run(serve_until_signal(app, listener, registry=line))
            finally:
                engine.close()
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0
