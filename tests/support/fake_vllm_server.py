"""Stands in for vLLM's server without startup time. It lists its model names and has a child
process in another session.

    fake_vllm_server.py FOLDER HOW --model M --served-model-name A B --host H --port P

HOW is well, silent, ends or denies. FOLDER/pids contains the ids of both processes,
FOLDER/environment.json their environment.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": name} for name in given.served_model_name]}).encode()
        self.send_response(401 if given.how == "denies" else 200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("how")
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    parent = [sys.executable, "-c", "from subprocess import *; print(Popen(['sleep', '600'], start_new_session=True, stdout=DEVNULL).pid)"]
    orphan = subprocess.run(parent, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    (given.folder / "environment.json").write_text(json.dumps(dict(os.environ)))
    (given.folder / "pids").write_text(f"{os.getpid()} {orphan}\n")
    print(f"stand-in: {given.how}", flush=True)
    if given.how == "ends":
        sys.exit(3)
    if given.how == "silent":
        sys.stdin = open(os.pipe()[0])  # noqa: SIM115 (nothing is ever written to this pipe)
        sys.stdin.read()
    HTTPServer((given.host, given.port), Handler).serve_forever()
