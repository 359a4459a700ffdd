"""Sandbox commands (python -m megatron_rl_sandbox): doctor, run FILE [--image IMG], serve, attack.

doctor reports the isolation layers and protections of this host. run executes one file. serve makes
a pool of boxes available over HTTP. attack runs attacks that test the protections of this host.
"""

import argparse
import asyncio
import sys
from dataclasses import fields
from pathlib import Path

from megatron_rl_sandbox import host_report
from megatron_rl_sandbox.layers import PROTECTIONS
from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import BoxLimits, CallResult, Fault, Isolation, SandboxError
from megatron_rl_sandbox.token import read_token

EXIT_OK, EXIT_CODE_FAILED, EXIT_LIMIT, EXIT_HOST = 0, 1, 2, 3
"""Exit statuses of `run`.

If the file cannot be read or an image is invalid, the command prints a message and exits with
status 1. If argparse rejects the arguments, the command exits with status 2.
"""

IMAGE_SOURCES_HELP = "shown images (image_0.rotate(90).show(), plt.show()), figures left open, saved image files"
"""Help text that lists the ways in which code can return images (see image_capture.py).

The value of the last expression is not returned, even if it is an image.
"""


ALLOW_MISSING_HELP = "start although this host lacks this protection (see doctor); repeatable"


def run_file(arguments: argparse.Namespace) -> int:
    """Run a file in a box, print its output and write the returned images to --out."""
    try:
        images = {f"image_{number}": path.read_bytes() for number, path in enumerate(arguments.image)}
        code = arguments.file.read_text(errors="surrogateescape")
    except OSError as error:
        print(f"sandbox run: {error}", file=sys.stderr)
        return EXIT_CODE_FAILED
    try:
        result = asyncio.run(
            _run_source(
                code, images=images, isolation=arguments.isolation, allow_missing=arguments.allow_missing, timeout_s=arguments.timeout
            )
        )
    except SandboxError as fault:
        print(f"sandbox run: {fault}", file=sys.stderr)
        return EXIT_HOST
    except ValueError as error:
        print(f"sandbox run: {error}", file=sys.stderr)
        return EXIT_CODE_FAILED
    sys.stdout.write(result.text)
    sys.stderr.write(result.stderr)
    if result.error is not None:
        print(result.error.traceback or f"{result.error.type}: {result.error.message}", file=sys.stderr)
    for drop in result.dropped:
        print(f"sandbox run: {drop}", file=sys.stderr)
    _save_images(result, arguments.out)
    if result.fault is Fault.HOST:
        return EXIT_HOST
    return EXIT_LIMIT if result.limit else EXIT_CODE_FAILED if result.error else EXIT_OK


async def _run_source(code: str, *, images: dict[str, bytes], isolation: str, allow_missing: list[str], timeout_s: float) -> CallResult:
    pool = SandboxPool(size=1, limits=BoxLimits(call_timeout_s=timeout_s), isolation=isolation, allow_missing=allow_missing)
    async with pool, await pool.open(images=images) as box:
        return await box.run(code)


def _save_images(result: CallResult, out: Path | None) -> None:
    for number, picture in enumerate(result.images):
        if out is None:
            shape = f"{picture.width}x{picture.height}"
            print(f"sandbox run: image {number}: {shape} from {picture.source} (use --out FOLDER to save it)", file=sys.stderr)
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{number}.png").write_bytes(picture.png)
    if out is not None and not result.images:
        print(
            f"sandbox run: --out {out}: the code returned no image; only these images are returned: {IMAGE_SOURCES_HELP}", file=sys.stderr
        )


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print a report on the isolation layers and protections of this host."""
    text, able = host_report.make_report()
    print(text)
    return EXIT_OK if able else EXIT_HOST


def run_server(arguments: argparse.Namespace) -> int:
    """Serve a pool over HTTP until SIGINT or SIGTERM."""
    from megatron_rl_sandbox import server  # the other commands do not need FastAPI

    limits = BoxLimits(**dict(arguments.limit))
    pool = SandboxPool(size=arguments.size, limits=limits, isolation=arguments.isolation, allow_missing=arguments.allow_missing)
    try:
        token = read_token(arguments.token_file) if arguments.token_file else ""
        place = {"token": token, "host": arguments.host, "port": arguments.port, "name": arguments.name}
        serving = server.run_server(pool, wait_s=arguments.wait, idle_timeout_s=arguments.idle, **place)
        asyncio.run(serving)
    except (SandboxError, OSError) as fault:  # OSError: the port is in use
        print(f"sandbox serve: {fault}", file=sys.stderr)
        return EXIT_HOST
    except ValueError as error:
        print(f"sandbox serve: {error}", file=sys.stderr)
        return EXIT_CODE_FAILED
    return EXIT_OK


def run_attacks(arguments: argparse.Namespace) -> int:
    """Run the attack suite."""
    from megatron_rl_sandbox.attack import suite

    return suite.main(arguments.probes)


def parse_limit(text: str) -> tuple[str, float]:
    """Parse a NAME=VALUE limit from the command line, such as `call_timeout_s=20`."""
    name, _, value = text.partition("=")
    kinds = {item.name: item.type for item in fields(BoxLimits)}
    if name not in kinds:
        raise argparse.ArgumentTypeError(f"unknown limit {name!r}; choose from {', '.join(kinds)}")
    return name, kinds[name](value)


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser with a subparser for each command."""
    top = argparse.ArgumentParser(prog="python -m megatron_rl_sandbox", description=__doc__)
    commands = top.add_subparsers(required=True)
    running = commands.add_parser("run", help="run one file; exits with 0, 1 (the code failed), 2 (limit exceeded) or 3 (the host failed)")
    running.add_argument("file", type=Path)
    running.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        help="image file; the code can use the variable or the file image_0, image_1, ...; repeatable",
    )
    running.add_argument("--out", type=Path, help=f"folder in which the returned images are saved; code can return {IMAGE_SOURCES_HELP}")
    running.add_argument("--timeout", type=float, default=BoxLimits().call_timeout_s, help="time limit in seconds (default %(default)g)")
    running.add_argument("--isolation", choices=[choice.value for choice in Isolation], default=Isolation.AUTO.value)
    running.add_argument("--allow-missing", choices=PROTECTIONS, action="append", default=[], help=ALLOW_MISSING_HELP)
    running.set_defaults(command=run_file)
    serving = commands.add_parser("serve", help="serve a pool over HTTP; prints the address once it is ready")
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any address except loopback requires --token-file (default %(default)s)"
    )
    serving.add_argument("--token-file", type=Path, help="file with the token that clients must send; without it, no token is needed")
    serving.add_argument("--port", type=int, default=8080, help="0 picks a free port (default %(default)s)")
    serving.add_argument("--size", type=int, default=8, help="maximum number of open boxes (default %(default)s)")
    serving.add_argument("--wait", type=float, default=10.0, help="seconds that a request waits for a free box (default %(default)g)")
    serving.add_argument(
        "--idle", type=float, default=600.0, help="close a box after this many seconds without a call (default %(default)g)"
    )
    serving.add_argument(
        "--limit",
        type=parse_limit,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit of BoxLimits, such as call_timeout_s=20; repeatable",
    )
    serving.add_argument("--name", default="", help="name reported by /health, to identify this server")
    serving.add_argument("--isolation", choices=[choice.value for choice in Isolation], default=Isolation.AUTO.value)
    serving.add_argument("--allow-missing", choices=PROTECTIONS, action="append", default=[], help=ALLOW_MISSING_HELP)
    serving.set_defaults(command=run_server)
    attacking = commands.add_parser(
        "attack", help="run every attack and its control; exits with 0 if all attacks failed and all controls succeeded"
    )
    attacking.add_argument("probes", nargs="*", metavar="NAME", help="names of probes or classes (default: all)")
    attacking.set_defaults(command=run_attacks)
    commands.add_parser("doctor", help="report what this host offers; exits with 0 or 3").set_defaults(command=run_doctor)
    return top


def main() -> int:
    """Run the command given on the command line and return its exit status."""
    arguments = build_parser().parse_args()
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
