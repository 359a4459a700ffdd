"""Decodes token ids with the tokenizer of a run's model, in a separate process.

The tokenizer file may come from an untrusted source, and it determines which code runs for each
token. The process therefore has limits on time, memory and response size, and a panic in the
tokenizers library ends only this process. Requests and responses are lines of JSON: [[5, 6], [7]]
-> ["two words", "."]. Tested with tokenizers 0.23.
"""

import json
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import IO

REQUEST_TIMEOUT_S = 20.0
"""Timeout of one request in seconds; the first request includes loading the tokenizer."""
MEMORY_BYTES = 2 << 30
MAX_RESPONSE_BYTES = 64 << 20
MAX_ERROR_CHARS = 200


class TokenDecoder:
    """Process that decodes tokens with one tokenizer.json; it is started by the first request.

    After a failure, the process is not restarted.
    """

    def __init__(self, file: Path, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._file, self._limit_s = file, timeout_s
        self._lock = threading.Lock()
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each token sequence.

        Raises:
            ValueError: the tokenizer file cannot be read, or decoding exceeds a limit.
        """
        with self._lock:
            if self._failure:
                raise ValueError(self._failure)
            try:
                return self._request_texts(json.dumps(list(map(list, sequences))).encode() + b"\n")
            except ValueError as error:
                self._failure = str(error)
                self._stop_process()
                raise

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop_process()

    def _request_texts(self, request: bytes) -> list[str]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (_end)
            command = [sys.executable, "-m", "megatron_rl.observe.viewer.token_decoder", str(self._file), str(self._limit_s)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(_send_request, self._process, request)
            try:
                line = answer.result(self._limit_s)
            except Late as error:
                self._process.kill()  # ends the pending request
                raise ValueError(f"{self._file} is not used: decoding its tokens took longer than {self._limit_s:g} s") from error
        if not line.endswith(b"\n"):
            self._process.kill()
            self._process.wait()
            raise ValueError(f"{self._file} cannot be read ({self._last_error(len(line))})")
        return [str(text) for text in json.loads(line)]

    def _last_error(self, num_bytes: int) -> str:
        if num_bytes == MAX_RESPONSE_BYTES:
            return f"the decoded texts exceed {MAX_RESPONSE_BYTES} bytes"
        assert self._errors is not None and self._process is not None, "the process was started"
        self._errors.seek(0)
        lines = self._errors.read(1 << 20).decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return said[:MAX_ERROR_CHARS] or f"its process exited with code {self._process.returncode}"

    def _stop_process(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None and self._errors is not None, "they are pipes"
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._errors.close()
        self._process = None


def _send_request(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a request and return the response line.

    The line has no newline if the process ended or the line is too long.
    """
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except OSError:  # the process has ended and logged the reason
        return b""
    return process.stdout.readline(MAX_RESPONSE_BYTES)


def serve_requests(file: Path, timeout_s: float) -> None:
    """Answer requests until standard input ends.

    The kernel enforces this process's limits on memory, file size and CPU time.
    """
    from tokenizers import Tokenizer

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # limits the log
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_cpu(timeout_s)
    tokenizer = Tokenizer.from_file(str(file))
    for line in sys.stdin.buffer:
        _limit_cpu(timeout_s)
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in json.loads(line)]
        sys.stdout.buffer.write(json.dumps(texts).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit_cpu(limit_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit_s) + 1, hard))


if __name__ == "__main__":
    serve_requests(Path(sys.argv[1]), float(sys.argv[2]))
