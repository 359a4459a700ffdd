"""Builds the command that starts a vLLM server for a run, and the server's fingerprint."""

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.config import EngineSettings, require
from megatron_rl.dtypes import dtype_name
from megatron_rl.io.bounded_files import read_bytes
from megatron_rl.io.jsonl import read_json
from megatron_rl.models.vocabulary import MAX_TOKENIZER_BYTES
from megatron_rl.rollout.vllm.engine_core import engine_arguments
from megatron_rl.rollout.vllm.http_gate import MIDDLEWARE, TOKEN_FILE
from megatron_rl.rollout.vllm.sampler import BANNED_IDS_KEY
from megatron_rl_sandbox.token import USER_KEY_VARIABLES

TRANSFER_BACKEND = "megatron_rl"
VLLM_VERSION = "0.32.0"
"""Version of vLLM that this package was written against and tested with."""
PROGRAM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
NO_MEDIA_DOMAIN = "none.invalid"
"""The only domain from which a server may fetch images. The domain cannot exist (RFC 6761), so a
server accepts images only as `data:` URLs. vLLM itself rejects `file:` URLs.
"""
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of config.json that do not affect the computation."""


def server_environment(settings: EngineSettings, *, token_file: str | Path) -> dict[str, str]:
    """Return the environment variables to set for a server in addition to inherited variables.

    vLLM provides the HTTP calls for weight updates only if VLLM_SERVER_DEV_MODE is set. For an
    engine with one worker, vLLM's multiprocessing is disabled. Otherwise, on a CPU, vLLM would
    start a separate process for the worker (0.32.0, platforms/cpu.py).
    """
    return {
        TOKEN_FILE: str(Path(token_file).absolute()),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if settings.tp == 1 else {}),
    }


def server_arguments(
    model_path: str, settings: EngineSettings, *,
    banned_ids: Sequence[int], pixels: tuple[int, int], cuda: bool, seed: int | None, timeout_s: float,
) -> list[str]:  # fmt: skip
    """Return the arguments of PROGRAM except --host and --port.

    The server reads no weights from disk, because the trainer sends the weights. On GPUs, each
    server needs a different `seed`, because servers with the same seed sample the same tokens.
    """
    given = engine_arguments(model_path, settings, cuda=cuda, pixels=pixels, reads_weights=False, timeout_s=timeout_s)
    given = {key: value for key, value in given.items() if key not in ("distributed_executor_backend", "enable_sleep_mode")}
    given |= {
        "mm_processor_cache_gb": 4, "tensor_parallel_size": settings.tp, "seed": seed,
        "additional_config": {BANNED_IDS_KEY: list(banned_ids)},
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": "megatron_rl.rollout.vllm.worker_extension.RlWorkerExtension",
        "logits_processors": "megatron_rl.rollout.vllm.worker_extension:BanAndSeed", "enable_scale_out": True,
        "middleware": MIDDLEWARE, "allowed_media_domains": NO_MEDIA_DOMAIN, "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        **({"distributed_executor_backend": "uni"} if settings.tp == 1 else {}),
    }  # fmt: skip
    return [word for key, value in given.items() if value is not None for word in _format_option(key.replace("_", "-"), value)]


def _format_option(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def launch_commands(model_path: str, settings: EngineSettings, *, banned_ids: Sequence[int], pixels: tuple[int, int], cuda: bool) -> str:
    """Return a shell command for each URL in engine.urls; without URLs, use 127.0.0.1:8000.

    Each command must be run on the server's node, in the environment in which this project is
    installed.

    Raises:
        ValueError: engine.token_file is not set.
    """
    remedy = "servers require a token file; create it and set the key: head -c 32 /dev/urandom | base64 > FILE; engine.token_file=FILE"
    require(bool(settings.token_file), "engine.token_file", settings.token_file, remedy)
    given = server_arguments(model_path, settings, banned_ids=banned_ids, pixels=pixels, cuda=cuda, seed=None, timeout_s=600.0)
    environment = [f"{name}={value}" for name, value in server_environment(settings, token_file=settings.token_file).items()]
    unset = [word for name in USER_KEY_VARIABLES for word in ("-u", name)]
    line = shlex.join(["env", *unset, *environment, *PROGRAM, *given])
    places = [urlsplit(url) for url in settings.urls or ["http://127.0.0.1:8000"]]
    return "\n".join(f"{line} --seed $RANDOM --host {shlex.quote(each.hostname or '')} --port {each.port or 80}" for each in places)


def engine_fingerprint(
    model_path: str, *, dtype: str, max_model_len: int, max_num_seqs: int, max_images: int, banned_ids: Sequence[int], logprobs_mode: str,
    backend: str, pixels: Mapping[str, object] | None,
) -> dict[str, str]:  # fmt: skip
    """Return the properties in which a server must match the run.

    An error message about a mismatch names the property by its key.
    """
    folder = Path(model_path)
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in IGNORED_CONFIG_KEYS}
    files = [folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")]
    tokenizer = [read_bytes(file, at_most=MAX_TOKENIZER_BYTES) for file in files if file.is_file()]
    return {
        "model": _short_digest(json.dumps(config, sort_keys=True).encode()),
        "tokenizer": _short_digest(*tokenizer),
        "weight transfer": backend or "none",
        "banned ids": _short_digest(json.dumps(list(banned_ids)).encode()),
        "logprobs_mode": logprobs_mode,
        "engine.dtype": dtype,
        "engine.max_model_len": str(max_model_len),
        "engine.max_num_seqs": str(max_num_seqs),
        "engine.max_images": str(max_images),
        "pixels": json.dumps(pixels, sort_keys=True),
    }


def expected_fingerprint(
    settings: EngineSettings, model_path: str, *, banned_ids: Sequence[int], pixels: tuple[int, int]
) -> dict[str, str]:
    """Return the fingerprint that a run with these settings requires."""
    sizes = {"size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]}}
    return engine_fingerprint(
        model_path, dtype=dtype_name(settings.dtype), max_model_len=settings.max_model_len, max_num_seqs=settings.max_num_seqs,
        max_images=settings.max_images, banned_ids=banned_ids, logprobs_mode="processed_logprobs", backend=TRANSFER_BACKEND, pixels=sizes,
    ) | routed_experts_property(settings.return_routed_experts)  # fmt: skip


def routed_experts_property(is_returned: bool) -> dict[str, str]:
    """Return the part of the fingerprint that states whether the engine records experts."""
    return {"engine.return_routed_experts": str(is_returned).lower()}


def _short_digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]
