"""Probes of a real vLLM server, with and without this project's request gate.

Start the probes with python -m benchmarks.probes.real_engine MODEL. One server is started with
the gate and one without; each start takes about a minute.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.probes.probe import Attempt, Probe, Row, table
from benchmarks.probes.servers import HERE, JSON, calls_another_method, paused_by_a_key_elsewhere, preflight_is_answered
from benchmarks.probes.sites import TOKEN, Site
from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.server_command import MIDDLEWARE, PROGRAM, server_arguments, server_environment
from megatron_rl.services.supervised_process import find_free_port

START_S = 400.0
PAGE = (("Host", "evil.example:8000"), ("Origin", "http://evil.example"), ("Content-Type", "text/plain;charset=UTF-8"))
KNOW = ("Authorization", f"Bearer {TOKEN}")


def tells_its_version(server: object, folder: Path) -> str:
    """Return a success message if a DNS-rebound page can read from the engine, else ""."""
    with server(folder) as site:
        answers = [site.ask("GET", path, ("Host", "evil.example"), KNOW) for path in ("/version", "/v1/models", "/metrics", "/weight_info")]
    return "a page with a rebound name reads from the engine" if any(code == 200 for code, _ in answers) else ""


def pauses_for_a_page(server: object, folder: Path) -> str:
    """Return a success message if a foreign web page can pause the engine, else ""."""
    with server(folder) as site:
        paused = site.ask("POST", "/pause?mode=abort", *PAGE, body=b"{}")[0] == 200
        site.ask("POST", "/resume", HERE, JSON, KNOW, body=b"{}")
    return "a page paused the engine" if paused else ""


def fetches_an_address(server: object, folder: Path) -> str:
    """Return a success message if a foreign web page can generate text, else ""."""
    body = b'{"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}'
    with server(folder) as site:
        code, _ = site.ask("POST", "/inference/v1/generate", *PAGE, body=body)
    return f"the engine generates for a page ({code})" if code not in (401, 403, 415, 421) else ""


ATTACKS = {
    "a page with a rebound name reads, with the token": tells_its_version,
    "a page pauses the engine": pauses_for_a_page,
    "a page requests a generation": fetches_an_address,
    "a page's preflight": preflight_is_answered,
    "the token in the query, a cookie or X-Api-Key": paused_by_a_key_elsewhere,
    "other worker methods, 42 variants": calls_another_method,
}


@contextmanager
def engine(model: str, folder: Path, *, is_gated: bool) -> Iterator[Site]:
    """Run a vLLM server, with the gate if `is_gated`, and yield its address."""
    (folder / "token").write_text(TOKEN)
    settings, renderer, port = (
        EngineSettings(kv_cache_mib=64, max_model_len=512),
        Renderer(ModelSettings(path=model)),
        find_free_port("127.0.0.1"),
    )
    words = server_arguments(
        model, settings, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels, cuda=False, seed=1, timeout_s=60.0
    )  # fmt: skip
    if not is_gated:
        at = words.index(MIDDLEWARE)
        del words[at - 1 : at + 1]
    environment = {**os.environ, **server_environment(settings, token_file=str(folder / "token"))}
    with (folder / "log").open("wb") as log:
        command = [*PROGRAM, *words, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        site, end = Site(port), time.monotonic() + START_S
        while not _is_up(site):
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(1.0)
        yield site
    finally:
        process.terminate()
        process.wait()


def _is_up(site: Site) -> bool:
    try:
        return site.ask("GET", "/health", HERE, KNOW)[0] == 200
    except OSError:
        return False


def attempts(model: str, *, is_gated: bool) -> list[Attempt]:
    """Start one server, run all attacks on it, and return their outcomes."""
    found = []
    with TemporaryDirectory() as folder, engine(model, Path(folder), is_gated=is_gated) as site:
        for name, attack in ATTACKS.items():
            began = time.monotonic()
            gained = attack(lambda _: nullcontext(site), Path(folder))
            found.append(Attempt(gained=gained, seconds=time.monotonic() - began))
            print(f"{'behind' if is_gated else 'without'} the gate: {name}: {gained or 'held'}", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Run all attacks, print the table and return the exit code."""
    (model,) = arguments
    pairs = zip(ATTACKS.items(), attempts(model, is_gated=True), attempts(model, is_gated=False), strict=True)
    rows = [Row(Probe("vLLM", name, attack, None, None), defended, control) for (name, attack), defended, control in pairs]
    print(table(rows))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
