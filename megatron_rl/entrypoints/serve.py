"""Serves the model of a run as an endpoint of OpenAI's chat completions (launch/serve.py RUN)."""

import errno
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from megatron_rl.config import EngineSettings, ModelSettings, require
from megatron_rl.config.serve import ServeSettings
from megatron_rl.distributed.world import connect, disconnect, read_world
from megatron_rl.dtypes import dtype_name
from megatron_rl.io.jsonl import to_json_line
from megatron_rl.models.hf_config import read_spec
from megatron_rl.registry import make_policy_endpoint, serve_policy_endpoint
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.conversation import SequenceLimits
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.paths import CONFIG_FILE
from megatron_rl.run.saved_model import SavedModel, find_saved_model
from megatron_rl.weights.formats.checkpoint_source import iterate_tensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_sandbox.http import open_listener
from megatron_rl_sandbox.token import read_token

CACHED_PATCHES = 1 << 18
"""Maximum number of image patches that the engine keeps between requests, which take up to 1.6 GB.
"""
GROUP_TIMEOUT_S = 600.0


def serve_run(given: ServeSettings) -> None:
    """Serve the model of a run until SIGINT or SIGTERM.

    Raises:
        ValueError: The run has no such model, or a setting does not fit the run.
        OSError: The address is in use.
        InfraError: The engine has failed.
    """
    world = read_world()
    require(world.size == 1, "--nproc_per_node", world.size, "the engine runs in one process; start serve.py without a launcher")
    model = find_saved_model(given.run, checkpoint=given.checkpoint)
    settings, model_settings, engine_settings = resolve_settings(given, model)
    token = read_token(settings.token_file) if settings.token_file else ""
    with ExitStack() as closing:
        listener = closing.enter_context(_listen(settings, token))
        _print_line(f"{model.weights}: loading the processor and the chat template")
        renderer = Renderer(model_settings, allow_grounding_tokens=bool(model.settings["task"]["data"]["allow_grounding_tokens"]))
        renderer.require_continuation()
        source = open_source(model.weights, read_spec(model_settings.path), key="RUN")
        _print_line(
            f"starting the engine ({engine_settings.dtype}, {engine_settings.max_model_len} tokens, "
            f"{engine_settings.max_images} images in a sequence)"
        )
        connect(world, timeout_s=GROUP_TIMEOUT_S)
        closing.callback(disconnect)
        engine = ColocatedEngine(
            model_settings.path, engine_settings, special_tokens=renderer.special_tokens, group=None, pixels=renderer.final_pixels,
            reads_weights=False, timeout_s=GROUP_TIMEOUT_S, cached_patches=CACHED_PATCHES,
        )  # fmt: skip
        closing.callback(engine.close)
        _print_line(f"loading {len(source.specs)} tensors")
        engine.load_weights(iterate_tensors(source), version=0)
        log = closing.enter_context(settings.log.open("a", buffering=1)) if settings.log else None
        endpoint = make_policy_endpoint(
            engine, renderer, settings, limits=_limits(model, engine_settings), max_new_tokens=_max_new_tokens(model),
            report=_print_line, log=partial(_write_record, log) if log else None, stop=partial(signal.raise_signal, signal.SIGTERM),
        )  # fmt: skip
        engine.run(serve_policy_endpoint(endpoint, settings, listener=listener, token=token, max_images=engine_settings.max_images))
        _print_line(f"stopped: {endpoint.describe()}")


@contextmanager
def _listen(settings: ServeSettings, token: str) -> Iterator[socket.socket]:
    with ExitStack() as closing:
        try:
            listener = closing.enter_context(open_listener(settings.host, settings.port, token=token, permits="sample from the model"))
        except OSError as error:
            remedy = "choose another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
            raise ValueError(f"--host={settings.host} --port={settings.port}: {error.strerror or error}; {remedy}") from error
        yield listener


def resolve_settings(given: ServeSettings, model: SavedModel) -> tuple[ServeSettings, ModelSettings, EngineSettings]:
    """Return the settings with the values of the run where none is given.

    Raises:
        ValueError: The settings of the run cannot be read.
    """
    try:
        found, engine = model.settings, model.settings["engine"]
        options = found["task"]["options"] if found["task"]["name"] == "agent" else {}
        settings = replace(
            given, ignore=(*options.get("ignore", ()), *given.ignore),
            temperature=float(found["algo"]["temperature"]) if given.temperature is None else given.temperature,
        )  # fmt: skip
        limits = found["model"]
        model_settings = ModelSettings(
            path=str(model.hf_folder), min_pixels=int(limits["min_pixels"]), max_pixels=int(limits["max_pixels"])
        )
        engine_settings = EngineSettings(
            dtype=dtype_name(given.dtype or engine["dtype"]), kv_cache_mib=given.kv_cache_mib or int(engine["kv_cache_mib"]),
            max_model_len=given.max_model_len or int(engine["max_model_len"]), max_images=given.max_images or int(engine["max_images"]),
            max_num_seqs=int(engine["max_num_seqs"]), gpu_memory_utilization=given.gpu_memory_utilization,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{given.run}: its {CONFIG_FILE} has no valid {error}; give a run of this version of the program") from error
    return settings, model_settings, engine_settings


def _limits(model: SavedModel, engine: EngineSettings) -> SequenceLimits:
    pixels = int(model.settings["task"]["max_pixels"])
    return SequenceLimits(max_sequence_tokens=engine.max_model_len, max_images=engine.max_images, max_pixels=pixels)


def _max_new_tokens(model: SavedModel) -> int:
    return int(model.settings["task"]["max_new_tokens"])


def _write_record(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(f"{to_json_line({'time': time.time(), **record})}\n")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
