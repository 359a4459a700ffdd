"""Receives weight updates for a served model from the run that trains the model (--trained).

    POST /weights   {"update": name, "part": 0, "parts": 2, "safetensors": base64}
    -> {"held": 1, "version": v}

An update is applied completely or not at all. The parts of an update must arrive in order. The
first part of a new update discards an update that is still incomplete. Until the last part has
arrived, the server keeps using its current weights. After the last part, the server waits for
requests in progress to finish, loads the weights, and continues with a new version. No shared disk
is needed.
"""

import asyncio
import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from fastapi import HTTPException, Request
from pydantic import Field, StringConstraints

from megatron_rl.errors import InfraError
from megatron_rl.models.name_mapping import canonical_name, nested_name
from megatron_rl.tasks.lewis.listener_protocol import StrictMessage
from megatron_rl_sandbox.http import read_body

if TYPE_CHECKING:  # these import torch
    import torch

    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder

MAX_PARTS = 4096


class WeightPart(StrictMessage):
    """One part of a weight update."""

    update: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    parts: Annotated[int, Field(ge=1, le=MAX_PARTS)]
    safetensors: str
    """Base64-encoded safetensors file that contains some of the model's tensors. Tensor names are
    the same as in the Hugging Face checkpoint.
    """


class WeightPartReply(StrictMessage):
    """Response to /weights."""

    held: int
    """Number of parts of the update that have been received."""
    version: str
    """Version of the weights that are currently in use."""


class PublishedWeightReceiver:
    """Collects the parts of one weight update."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Create the receiver.

        Args:
            shapes: Maps the name of each tensor in an update to its shape. Other tensors are
                rejected, so the memory for an update is bounded.
        """
        self._shapes = shapes
        self._update, self._parts, self._num_received = "", 0, 0
        self._tensors: dict[str, torch.Tensor] = {}

    def add_part(self, part: WeightPart) -> "tuple[int, dict[str, torch.Tensor] | None]":
        """Add a part of an update.

        Returns:
            The number of received parts, and all tensors of the update. The tensors are None until
            the last part has been added.

        Raises:
            ValueError: The part is out of order or invalid for this model. The client must send the
                update again from its first part.
        """
        if part.part == 0:
            self._update, self._parts, self._num_received, self._tensors = part.update, part.parts, 0, {}
        if (part.update, part.parts, part.part) != (self._update, self._parts, self._num_received):
            raise ValueError(
                f"part {part.part} of {part.parts} of {part.update}: part {self._num_received} of {self._update} is expected; "
                "resend all parts"
            )
        try:
            tensors = _decode_tensors(part.safetensors)
            self._require_fit(tensors)
            self._tensors |= tensors
            lacking = sorted(self._shapes.keys() - self._tensors.keys())
            if part.part + 1 == part.parts and lacking:
                raise ValueError(f"{len(lacking)} tensors are missing: {', '.join(lacking[:3])}")
        except ValueError:
            self._update, self._tensors = "", {}
            raise
        self._num_received += 1
        if self._num_received < self._parts:
            return self._num_received, None
        complete, self._update, self._tensors = self._tensors, "", {}
        return self._parts, complete

    def _require_fit(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        for name, tensor in tensors.items():
            if name not in self._shapes or name in self._tensors:
                raise ValueError(
                    f"{name[:200]}: {'was already sent in this update' if name in self._tensors else 'is not a tensor of this model'}"
                )
            if tuple(tensor.shape) != tuple(self._shapes[name]):
                raise ValueError(f"{name}: has shape {tuple(tensor.shape)}, but the shape in this model is {tuple(self._shapes[name])}")
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name}: contains values that are not finite numbers")


def _decode_tensors(text: str) -> "dict[str, torch.Tensor]":
    """Decode a base64-encoded safetensors file.

    Tensor names are converted to the newer names of Hugging Face checkpoints
    (models/name_mapping.py).

    Raises:
        ValueError: The text is not a base64-encoded safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return {nested_name(canonical_name(name)): tensor for name, tensor in load(base64.b64decode(text, validate=True)).items()}
    except (binascii.Error, SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"safetensors: cannot be read ({error})"[:300]) from error


class WeightUpdateHandler:
    """Handler of the route /weights."""

    def __init__(self, engine: "EngineHolder") -> None:
        self.engine, self._weight_receiver, self._lock = engine, PublishedWeightReceiver(engine.tensor_shapes), asyncio.Lock()

    async def handle_weight_part(self, request: Request) -> WeightPartReply:
        """Receive one part of an update, and load the update after its last part.

        The response has status 422 if the part is invalid for this model, and status 503 if the
        engine fails to load the weights.
        """
        given = await read_body(request, WeightPart)
        async with self._lock:
            try:
                held, tensors = await asyncio.to_thread(self._weight_receiver.add_part, given)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            if tensors is not None:
                try:
                    await asyncio.shield(self.engine.load_weights(tensors))
                except InfraError as error:
                    raise HTTPException(503, str(error)) from error
        return WeightPartReply(held=held, version=self.engine.version)
