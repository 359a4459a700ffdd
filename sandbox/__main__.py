"""python -m sandbox doctor | run FILE [--image IMG]... : what the host offers; one file of code in a box of its own."""

import argparse
import asyncio
import sys
from pathlib import Path

from sandbox import doctor
from sandbox.pool import Sandbox
from sandbox.types import Fault, HostFault, Isolation, Limits, Result

GOOD, CODE_FAILED, LIMIT, HOST = 0, 1, 2, 3
"""Exit statuses of `run`. A mistake in the arguments, an unreadable image included, is 1 with a message, or argparse's own 2."""


def run(arguments: argparse.Namespace) -> int:
    """Prints what the code printed and writes the images that it made to --out."""
    try:
        images = {f"image_{number}": path.read_bytes() for number, path in enumerate(arguments.image)}
        code = arguments.file.read_text(errors="surrogateescape")
    except OSError as error:
        print(f"sandbox run: {error}", file=sys.stderr)
        return CODE_FAILED
    try:
        result = asyncio.run(_run(code, images=images, isolation=arguments.isolation, timeout_s=arguments.timeout))
    except HostFault as fault:
        print(f"sandbox run: {fault}", file=sys.stderr)
        return HOST
    except ValueError as error:
        print(f"sandbox run: {error}", file=sys.stderr)
        return CODE_FAILED
    sys.stdout.write(result.text)
    sys.stderr.write(result.stderr)
    if result.error is not None:
        print(result.error.traceback or f"{result.error.type}: {result.error.message}", file=sys.stderr)
    for drop in result.dropped:
        print(f"sandbox run: {drop}", file=sys.stderr)
    _save(result, arguments.out)
    if result.fault is Fault.HOST:
        return HOST
    return LIMIT if result.limit else CODE_FAILED if result.error else GOOD


async def _run(code: str, *, images: dict[str, bytes], isolation: str, timeout_s: float) -> Result:
    async with Sandbox(size=1, limits=Limits(call_s=timeout_s), isolation=isolation) as pool, await pool.open(images=images) as box:
        return await box.run(code)


def _save(result: Result, out: Path | None) -> None:
    for number, picture in enumerate(result.images):
        if out is None:
            print(f"sandbox run: image {number}: {picture.width}x{picture.height} from {picture.source} (--out FOLDER keeps it)", file=sys.stderr)
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{number}.png").write_bytes(picture.png)


def tell(arguments: argparse.Namespace) -> int:
    text, able = doctor.report()
    print(text)
    return GOOD if able else HOST


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    commands = top.add_subparsers(required=True)
    running = commands.add_parser("run", help="one file of code; exits 0, 1 (the code failed), 2 (a limit), 3 (the host)")
    running.add_argument("file", type=Path)
    running.add_argument("--image", type=Path, action="append", default=[], help="becomes image_0, image_1, ...: variable and file")
    running.add_argument("--out", type=Path, help="folder for the images that the code made")
    running.add_argument("--timeout", type=float, default=Limits().call_s, help="seconds (default %(default)g)")
    running.add_argument("--isolation", choices=[choice.value for choice in Isolation], default=Isolation.AUTO.value)
    running.set_defaults(command=run)
    commands.add_parser("doctor", help="what this host offers; exits 0 or 3").set_defaults(command=tell)
    return top


def main() -> int:
    arguments = parser().parse_args()
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
