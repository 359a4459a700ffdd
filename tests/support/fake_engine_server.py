"""Stands in for a vLLM server that a run starts. It is healthy at once, or behaves as FOLDER/how
specifies.

    fake_engine_server.py FOLDER ... --host H --port P

The server rejects requests without its token and proves that it knows the token. FOLDER/how is read
at each start and at each request: well; silent (does not respond); ends (exits with code 3 after
two lines of output). Each start appends a line to FOLDER/starts with the process id, the CPU cores,
and variables of the environment.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from megatron_rl.rollout.vllm.http_gate import TOKEN_FILE
from megatron_rl_sandbox.access import CHALLENGE_HEADER, PROOF_HEADER, compute_proof
from megatron_rl_sandbox.token import read_token


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        while read_behavior() == "silent":
            time.sleep(0.05)
        token = read_token(os.environ[TOKEN_FILE])
        self.send_response(401)
        self.send_header(PROOF_HEADER, compute_proof(token, self.headers[CHALLENGE_HEADER], port=port))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *given: object) -> None:
        """Log nothing."""


def read_behavior() -> str:
    return (folder / "how").read_text()


if __name__ == "__main__":
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    host, port = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", "OPENAI_API_KEY", "RANK")
    told = {name: os.environ.get(name) for name in names}
    told |= {"seed": words[words.index("--seed") + 1]}
    with (folder / "starts").open("a") as starts:
        starts.write(json.dumps({"pid": os.getpid(), "port": port, "cores": sorted(os.sched_getaffinity(0)), **told}) + "\n")
    if read_behavior() == "ends":
        print("first it says this\nValueError: then why", flush=True)
        sys.exit(3)
    HTTPServer((host, port), Handler).serve_forever()
