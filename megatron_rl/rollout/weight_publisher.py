"""Publishes the policy's weights over HTTP to services that generate with this policy.

The services serve this policy as a partner model to another run
(tasks/lewis/server/weight_updates.py). A service that accepts an update uses the new weights from
then on. If a service does not accept an update, the failure is logged; the service keeps its
current weights and receives the next update.
"""

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import save

from megatron_rl.clients.endpoint_pool import EndpointError, KeyRefused, describe_error, to_one_line
from megatron_rl.config import WeightPublishSettings, require
from megatron_rl.distributed.world import raise_on_all_ranks
from megatron_rl.rollout.vllm.weight_receiver import split_into_buckets
from megatron_rl_sandbox.bounded_http import DENIED_STATUSES, NoResponse, send_request
from megatron_rl_sandbox.token import read_token

MAX_RESPONSE_BYTES = 64 << 10
"""Maximum size of a response in bytes."""

TensorsFn = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class _SentWeights(BaseModel):
    held: int
    version: str


class WeightPublisher:
    """Sends weight updates to all services of a run.

    Every rank has a publisher, but only the main rank sends weights.
    """

    def __init__(self, settings: WeightPublishSettings, *, run: str, is_main: bool, log: Callable[[str], None] = print) -> None:
        """Create a publisher and read the services' token.

        Raises:
            ValueError: The token file cannot be read.
        """
        self._settings, self._run, self._is_main, self._log = settings, run, is_main, log
        self._token = read_token(Path(settings.token_file)) if settings.token_file else ""

    def publish_initial(self, tensors: TensorsFn, *, step: int) -> None:
        """Send the weights with which the run starts or resumes.

        All ranks must call this method together.

        Raises:
            ValueError: On every rank, if a service did not accept the weights.
        """
        behind = self._send_all(tensors, step=step).get("weight_publish/num_behind", 0.0)
        remedy = f"{behind:.0f} of the services did not accept the initial weights; start them, or correct the addresses"
        raise_on_all_ranks(lambda: require(not behind, "weight_publish.urls", self._settings.urls, remedy))

    def publish(self, tensors: TensorsFn, *, step: int) -> dict[str, float]:
        """Send the current weights if `step` is a multiple of weight_publish.every.

        All ranks must call this method together. On the main rank, returns the metric
        weight_publish/num_behind: the number of services that have not accepted these weights.
        """
        return {} if step % self._settings.every else self._send_all(tensors, step=step)

    def _send_all(self, tensors: TensorsFn, *, step: int) -> dict[str, float]:
        given = self._settings
        if not given.urls:
            return {}
        if not self._is_main:
            for _ in tensors():
                pass
            return {}
        parts = [_encode_bucket(bucket) for bucket in split_into_buckets(tensors(), int(given.chunk_mib * 2**20))]
        with ThreadPoolExecutor(len(given.urls)) as threads:
            faults = [
                fault
                for fault in threads.map(lambda url: self._send_with_retries(url, parts, f"{self._run} step {step}"), given.urls)
                if fault
            ]
        for fault in faults:
            self._log(f"weight_publish: {fault}")
        return {"weight_publish/num_behind": float(len(faults))}

    def _send_with_retries(self, url: str, parts: list[str], update: str) -> str:
        """Send an update to one service; return the failure reason, or '' on success.

        Raises:
            ValueError: The service rejects the token; this is not treated as an outage.
        """
        fault = ""
        for _ in range(self._settings.max_attempts):
            try:
                self._send(url, parts, update[:200])
                return ""
            except KeyRefused as refused:
                raise ValueError(f"weight_publish.urls={url}: {refused}: weight_publish.token_file=FILE") from refused
            except EndpointError as error:
                fault = f"{url}: {error}"
        return fault

    def _send(self, url: str, parts: list[str], update: str) -> None:
        for number, part in enumerate(parts):
            body = {"update": update, "part": number, "parts": len(parts), "safetensors": part}
            try:
                answer = send_request(
                    "POST", f"{url}/weights", body, timeout_s=self._settings.timeout_s, max_bytes=MAX_RESPONSE_BYTES, token=self._token
                )
            except NoResponse as error:
                raise EndpointError(to_one_line(str(error))) from error
            if answer.status in DENIED_STATUSES:
                raise KeyRefused(f"responds with HTTP {answer.status} ({to_one_line(answer.text)}); set the service's token")
            if answer.status != 200:
                hint = "; start it with --trained" if answer.status == 404 else ""
                raise EndpointError(f"HTTP {answer.status}: {to_one_line(answer.text)}{hint}")
            try:
                held = _SentWeights.model_validate_json(answer.content).held
            except ValidationError as error:
                raise EndpointError(describe_error(error)) from error
            if held != number + 1:
                raise EndpointError(f"has received {held} parts, but {number + 1} were sent")


def _encode_bucket(bucket: list[tuple[str, torch.Tensor]]) -> str:
    return base64.b64encode(save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket})).decode()
