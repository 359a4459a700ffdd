"""Bearer tokens of servers, stored in files.

Tokens are passed neither in command lines, which the process list shows, nor in settings, which are
written to logs.
"""

import os
import re
import secrets
from ipaddress import ip_address
from pathlib import Path

USER_KEY_VARIABLES = ("OPENAI_API_KEY", "VLLM_API_KEY")
"""Environment variables with API keys of the user, which a run's servers do not inherit.

If VLLM_API_KEY were set for a vLLM server, the server would require that key from its clients.
"""
MAX_TOKEN_BYTES = 1000
"""Maximum number of bytes read from a token file."""


def read_token(path: str | Path) -> str:
    """Return the token that a file contains.

    Raises:
        ValueError: The file is unreadable or is not one word of 16 to 256 ASCII characters.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # non-blocking: a FIFO must not stall
            text = (file.read(MAX_TOKEN_BYTES) or b"").decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not re.fullmatch(r"[!-~]{16,256}", text):
        raise ValueError(
            f"{path}: a token must consist of 16 to 256 characters without spaces; create one: head -c 32 /dev/urandom | base64 > {path}"
        )
    return text


def bearer_header(token: str) -> dict[str, str]:
    """Return the Authorization header for a token, or an empty dict for an empty token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def write_token(file: Path) -> str:
    """Create a random token, store it in `file` with mode 600, and return it."""
    token = secrets.token_urlsafe(32)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token)
    return token


def is_reachable_remotely(address: str) -> bool:
    """Return True if a listener at this numeric IP address is reachable from other machines."""
    return not ip_address(address.partition("%")[0]).is_loopback
