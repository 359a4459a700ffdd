"""Command line of launch/serve.py for the model of a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.compat.startup import ignore_library_warnings, paused_collector
from megatron_rl.config.serve import ServeSettings
from megatron_rl.errors import InfraError, RunFailed
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.run.shutdown import EXIT_INTERRUPTED

EXAMPLES = """examples:
  serve.py runs/agent                                     the final model, or the newest checkpoint of an unfinished run
  serve.py runs/agent --checkpoint best --port 9000
  serve.py runs/agent/checkpoints/step_00000040 --temperature 0
  serve.py runs/agent --host 0.0.0.0 --token-file key     for other machines, with a key
  serve.py runs/agent --model-name gpt-4o                 for agents that ask for this model

The last line of the start is the address for OPENAI_BASE_URL. Ctrl-C stops the server.
serve.py KEY=VALUE ... starts the services of a run; see serve.py --help.
"""


def names_run(arguments: Sequence[str]) -> bool:
    """Return True if the first argument of serve.py is a run, and not a setting or a flag."""
    first = arguments[0] if arguments else "-"
    return not first.startswith("-") and ("=" not in first or Path(first).is_dir())


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="serve.py", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve the model of a run as an endpoint of OpenAI's chat completions.",
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir of a run, its folder final/, or one of its checkpoints")
    parser.add_argument(
        "--checkpoint", default="", metavar="NAME",
        help="model of a run: final, last, best (highest greedy success) or a number of steps (default: final, or else last)",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than loopback need --token-file (default: 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for any free port (default: 8000)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the key that requests need (OPENAI_API_KEY)")
    parser.add_argument(
        "--model-name", action="append", default=[], metavar="NAME",
        help="name of the model that requests may use in addition to `policy`; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="temperature of requests without one (default: algo.temperature of the run)"
    )
    parser.add_argument("--max-requests", type=int, default=256, metavar="N", help="maximum number of requests in progress (default: 256)")
    parser.add_argument(
        "--max-sessions", type=int, default=1000, metavar="N",
        help="number of conversations that are continued token for token; older ones are rendered from their messages (default: 1000)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="time limit of a request in seconds (default: 600)")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="NAME",
        help="unsupported setting of requests that is ignored instead of rejected; repeatable (default: task.options.ignore of the run)",
    )  # fmt: skip
    parser.add_argument("--log", type=Path, metavar="FILE", help="JSON Lines file for every request with its token ids")
    parser.add_argument("--dtype", default="", choices=("float32", "bfloat16"), help="data type of the engine (default: that of the run)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="maximum number of tokens in a sequence (default: engine.max_model_len of the run)",
    )
    parser.add_argument(
        "--max-images",
        type=int,
        default=0,
        metavar="N",
        help="maximum number of images in a sequence (default: engine.max_images of the run)",
    )
    parser.add_argument(
        "--kv-cache-mib", type=int, default=0, metavar="MIB", help="size of the KV cache on a CPU (default: engine.kv_cache_mib of the run)"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="F",
        help="fraction of the GPU's memory that the engine uses (default: 0.9)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    given = vars(build_parser().parse_args(arguments))
    names, ignore, timeout_s = tuple(given.pop("model_name")), tuple(given.pop("ignore")), given.pop("timeout")
    ignore_library_warnings()
    try:
        settings = ServeSettings(**given, model_names=names, ignore=ignore, request_timeout_s=timeout_s)
        print(f"{settings.run}: starting", file=sys.stderr, flush=True)
        with paused_collector():
            from megatron_rl.entrypoints.serve import serve_run  # imports torch
        serve_run(settings)
    except KeyboardInterrupt:
        print("stopped before the endpoint was ready", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except (ValueError, OSError, RunFailed, InfraError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
