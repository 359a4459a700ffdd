"""View runs in a browser: curves, rollouts, groups, and episodes token by token.

    python -m megatron_rl.observe.viewer runs/agent
    python -m megatron_rl.observe.viewer runs/a runs/b --port 8010     # two runs on one page
    python -m megatron_rl.observe.viewer runs                          # all runs below a folder
    python -m megatron_rl.observe.viewer --demo                        # a generated run, to try it
    ssh -L 8008:127.0.0.1:8008 machine                                 # for a remote run
    # write the page as files, for `python -m http.server -d pages` or any other web server:
    python -m megatron_rl.observe.viewer runs/a --export pages
    # for other users, who open the page once as /?token=...:
    python -m megatron_rl.observe.viewer runs/a --host 0.0.0.0 --token-file token

The viewer reads the directories of finished and ongoing runs and evaluations, and writes nothing.
Runs with rollouts.save=all contain every rollout. Other runs contain the best and worst rollouts of
each step.
"""

import argparse
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pyarrow as pa
import uvicorn

from megatron_rl.observe.viewer.demo import make_demo_run
from megatron_rl.observe.viewer.export import export_runs
from megatron_rl.observe.viewer.store import RunFolder, find_runs, label_folders
from megatron_rl.observe.viewer.web_app import create_app
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import make_uvicorn_config
from megatron_rl_sandbox.token import is_reachable_remotely, read_token


def main(arguments: Sequence[str]) -> int:
    """Run the viewer with these command-line arguments and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.observe.viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="run.dir of a run or an evaluation, or a folder of them")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: only this machine can connect)")
    parser.add_argument("--port", type=int, default=8008)
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME", help="additional host name to accept in requests; can be repeated"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the access token; required if other machines can connect"
    )
    parser.add_argument("--memory-gb", type=float, default=8.0, metavar="GB", help="memory limit of the viewer in GB (default 8)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the page and its data to a new folder instead of serving it")
    parser.add_argument("--demo", action="store_true", help="add a small generated run")
    options = parser.parse_args(arguments)
    if not options.runs and not options.demo:
        parser.error("give a run directory, or --demo")
    with TemporaryDirectory() as made:
        if options.demo:
            make_demo_run(Path(made) / "demo")
            options.runs.append(Path(made) / "demo")
        return serve_viewer(options)


def serve_viewer(options: argparse.Namespace) -> int:
    """Serve or export the page, and return the exit status.

    The status is 2 in these cases: a folder is missing or contains no run, the folder of an export
    cannot be written, the token file is invalid, the address cannot be used, or the address is
    remotely reachable and no token is given.
    """
    missing = [str(run) for run in options.runs if not run.is_dir()]
    if missing:
        print(f"error: RUN={missing[0]}: no such folder; give the run.dir of a run", file=sys.stderr)
        return 2
    runs = {run: find_runs(run) for run in options.runs}
    empty = [str(run) for run, found in runs.items() if not found]
    if empty:
        print(f"error: RUN={empty[0]}: contains no run; give the run.dir of a run, or a folder of runs", file=sys.stderr)
        return 2
    folders = label_folders([run for found in runs.values() for run in found])
    if options.export:
        return export_page(options, folders)
    try:
        token = read_token(options.token_file) if options.token_file else ""
    except ValueError as error:
        print(f"error: --token-file={error}", file=sys.stderr)
        return 2
    with closing(socket.socket()) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((options.host, options.port))
            listening.listen()  # early connections wait in the queue
        except (OSError, OverflowError) as error:
            told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            key, given = ("host", options.host) if isinstance(error, socket.gaierror) else ("port", options.port)
            print(f"error: --{key}={given}: {told}; choose another value", file=sys.stderr)
            return 2
        host, port = listening.getsockname()[:2]
        if is_reachable_remotely(host) and not token:
            print(
                f"error: --host={options.host}: other machines can reach this address; give --token-file=FILE, or use ssh -L",
                file=sys.stderr,
            )
            return 2
        limit_memory(options.memory_gb)
        print(f"http://{host}:{port}/", flush=True)
        hosts = ["127.0.0.1", "localhost", options.host, socket.gethostname(), *options.allow]
        app = create_app(folders, hosts=hosts, token=token)
        Thread(target=read_tables, args=(folders,), daemon=True).start()
        uvicorn.Server(make_uvicorn_config(app, ConnectionRegistry())).run(sockets=[listening])
    return 0


def read_tables(folders: Mapping[str, RunFolder]) -> None:
    """Read the tables of all runs before the page asks for them."""
    for folder in folders.values():
        folder.rollout_table()


def export_page(options: argparse.Namespace, folders: Mapping[str, RunFolder]) -> int:
    """Write the page as files and return the exit status."""
    limit_memory(options.memory_gb)
    try:
        count = export_runs(folders, options.export)
    except ValueError as error:
        print(f"error: --export={options.export}: {error}", file=sys.stderr)
        return 2
    print(f"exported {count} rollouts; view them with: python -m http.server -d {options.export}")
    return 0


def limit_memory(gb: float) -> None:
    """Limit this process's memory.

    A file that cannot be read within the limit is skipped and reported. The memory pool of pyarrow
    is replaced, because the memory that it reserves in advance would count toward the limit.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = int(gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
