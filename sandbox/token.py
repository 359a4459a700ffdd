"""The word that a server asks for and a client says. It lies in a file: command lines are in the list of processes, settings in logs."""

import os
import re
import secrets
from ipaddress import ip_address
from pathlib import Path

USER_KEY_VARIABLES = ("OPENAI_API_KEY", "VLLM_API_KEY")
"""Variables with keys of the user, which no server that is started for a run inherits. A vLLM server asks for the latter one."""
MAX_TOKEN_BYTES = 1000
"""Limit of a token file."""


def read_token(path: str | Path) -> str:
    """Raises ValueError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO is not waited for
            text = (file.read(MAX_TOKEN_BYTES) or b"").decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not re.fullmatch(r"[!-~]{16,256}", text):
        raise ValueError(f"{path}: a token is one word of 16 to 256 characters: head -c 32 /dev/urandom | base64 > {path}")
    return text


def bearer_header(token: str) -> dict[str, str]:
    """Return the headers of a client that knows the token; none without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def write_token(file: Path) -> str:
    """Make a new token, put it into the file, which only its owner may read, and return it."""
    token = secrets.token_urlsafe(32)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token)
    return token


def is_reachable_remotely(address: str) -> bool:
    """Whether others than this machine reach what listens there: an address of numbers, as a socket tells its own."""
    return not ip_address(address.partition("%")[0]).is_loopback
