"""Client of the sandbox server that a run uses."""

from megatron_rl.config import SandboxSettings
from megatron_rl_sandbox.sandbox_client import SandboxClient
from megatron_rl_sandbox.token import read_token


def make_sandbox_client(settings: SandboxSettings) -> SandboxClient:
    """Return a client of the sandbox server at `settings.url`.

    Raises:
        ValueError: The token file contains no token.
    """
    try:
        return SandboxClient(settings.url, token=read_token(settings.token_file) if settings.token_file else "")
    except ValueError as error:
        raise ValueError(f"task.sandbox.token_file={error}") from error
