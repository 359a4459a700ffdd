"""Checks the health of a judge's endpoints by listing the models that each endpoint serves.

A run checks the endpoints at startup; the doctor command checks them before a run. Written against
openai 3.52.0.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import openai
from pydantic import BaseModel, Field, ValidationError

from megatron_rl.clients.endpoint_pool import describe_error, to_one_line
from megatron_rl.clients.openai import describe_key_error
from megatron_rl.clients.proxies import proxy_hint
from megatron_rl.errors import InfraError

HEALTH_TIMEOUT_S = 5.0
"""Timeout in seconds of a health check."""


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model] = Field(min_length=1)


@dataclass(slots=True, frozen=True)
class HealthCheck:
    """Result of an endpoint's health check."""

    models: Sequence[str] = ()
    """Names of the served models.

    If the endpoint is busy or does not list its models, both `models` and `error` are empty.
    """
    error: str = ""
    """Reason why the endpoint cannot be used as a judge; empty if the endpoint works."""
    is_denied: bool = False
    """True if the endpoint rejects the key."""


async def list_models(client: openai.AsyncOpenAI) -> list[str]:
    """Return the names of the models that an endpoint serves.

    Raises errors of the openai package, or pydantic's ValidationError if the body is not a list of
    models.
    """
    raw = await client.models.with_raw_response.list()
    return [model.id for model in _Models.model_validate_json(raw.content).data]


async def check_endpoints(clients: Mapping[str, openai.AsyncOpenAI], *, model: str, secret: str, token_file: str) -> dict[str, HealthCheck]:
    """Check all endpoints concurrently and return the results, keyed by address.

    Args:
        clients: Client of each endpoint, keyed by address.
        model: Model that each endpoint must serve; an empty name accepts any model.
        secret: API key of the endpoints, as returned by `api_key` (clients/openai.py).
        token_file: File that contains the key, for error messages.
    """
    greetings = await asyncio.gather(
        *(_check_endpoint(client, model=model, secret=secret, token_file=token_file) for client in clients.values())
    )
    return dict(zip(clients, greetings, strict=True))


async def _check_endpoint(client: openai.AsyncOpenAI, *, model: str, secret: str, token_file: str) -> HealthCheck:
    proxy = proxy_hint(str(client.base_url))
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            served = await list_models(client)
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        return HealthCheck(error=describe_key_error(error, secret=secret, token_file=token_file), is_denied=True)
    except (openai.APIStatusError, ValidationError):
        return HealthCheck()
    except TimeoutError:
        return HealthCheck(error=f"no response within {HEALTH_TIMEOUT_S:.0f} s{proxy}")
    except openai.OpenAIError as error:
        return HealthCheck(error=describe_error(error.__cause__ or error, secret=secret) + proxy)
    named = f"serves {to_one_line(', '.join(served))}, not task.judge.model={model}: choose one of these"
    return HealthCheck(served, named if model and model not in served else "")


def health_warning(checks: Mapping[str, HealthCheck], *, role: str = "judge", key: str = "") -> str:
    """Return a warning about the failed endpoints; empty if all endpoints work.

    Args:
        checks: Results, keyed by address.
        role: Name of the service in messages, which is also the name of its section in the task's
            settings.
        key: Setting that contains the addresses, if it is not task.ROLE.urls.

    Raises:
        InfraError: No endpoint works, or an endpoint rejects the key.
    """
    troubles = [f"{url}: {greeting.error}" for url, greeting in checks.items() if greeting.error]
    if not troubles:
        return ""
    key, urls, why = key or f"task.{role}.urls", list(checks), "; ".join(troubles)
    if len(troubles) == len(checks):
        raise InfraError(f"{key}={urls}: no {role} is available ({why}); start one, or correct the addresses")
    if denied := [f"{url}: {greeting.error}" for url, greeting in checks.items() if greeting.is_denied]:
        raise InfraError(f"{key}={urls}: {'; '.join(denied)}")
    return f"{key}={urls}: not all are available, continuing with the others ({why})"
