"""The weights of a model in training, which its run sends to a service that answers with them (--trained): all of them, or none.

    POST /weights   {"update": name, "part": 0, "parts": 2, "safetensors": base64}  -> {"held": 1, "version": v}

Parts come in order, and one update at a time: the first part of another takes its place. Until the last has come the service answers with
the weights that it has; then it lets what is under way end, loads, and goes on under another version. No disk is shared.
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
from megatron_rl.tasks.lewis.listener_protocol import Strict
from sandbox.http import read

if TYPE_CHECKING:  # they bring torch
    import torch

    from megatron_rl.tasks.lewis.server.engine_holder import EngineRoom

MOST_PARTS = 4096


class WeightPart(Strict):
    update: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    part: Annotated[int, Field(ge=0, lt=MOST_PARTS)]
    parts: Annotated[int, Field(ge=1, le=MOST_PARTS)]
    safetensors: str
    """base64 of a file of this format that holds some of the tensors, by their names in Hugging Face's checkpoints."""


class Held(Strict):
    held: int
    """Parts of the update that are here."""
    version: str
    """With what is answered now."""


class Incoming:
    """Parts of one update."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` by name, of all tensors that an update has: what else comes is refused, so that an update takes no more memory than it
        must."""
        self._shapes = shapes
        self._update, self._parts, self._held = "", 0, 0
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, given: WeightPart) -> "tuple[int, dict[str, torch.Tensor] | None]":
        """Parts that are here, and all tensors with the last of them. ValueError: it is none of this model, or out of turn; the update is
        then to be sent anew."""
        if given.part == 0:
            self._update, self._parts, self._held, self._tensors = given.update, given.parts, 0, {}
        if (given.update, given.parts, given.part) != (self._update, self._parts, self._held):
            raise ValueError(
                f"part {given.part} of {given.parts} of {given.update}: part {self._held} of {self._update} is due; begin anew"
            )
        try:
            tensors = _read(given.safetensors)
            self._require_fit(tensors)
            self._tensors |= tensors
            lacking = sorted(self._shapes.keys() - self._tensors.keys())
            if given.part + 1 == given.parts and lacking:
                raise ValueError(f"{len(lacking)} tensors did not come: {', '.join(lacking[:3])}")
        except ValueError:
            self._update, self._tensors = "", {}
            raise
        self._held += 1
        if self._held < self._parts:
            return self._held, None
        complete, self._update, self._tensors = self._tensors, "", {}
        return self._parts, complete

    def _require_fit(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        for name, tensor in tensors.items():
            if name not in self._shapes or name in self._tensors:
                raise ValueError(f"{name[:200]}: {'came before' if name in self._tensors else 'is no tensor of this model'}")
            if tuple(tensor.shape) != tuple(self._shapes[name]):
                raise ValueError(f"{name}: has shape {tuple(tensor.shape)}, this model's is {tuple(self._shapes[name])}")
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name}: holds what is no finite number")


def _read(text: str) -> "dict[str, torch.Tensor]":
    """By the newer spelling of their names. ValueError: it is no such file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return {nested_name(canonical_name(name)): tensor for name, tensor in load(base64.b64decode(text, validate=True)).items()}
    except (binascii.Error, SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"safetensors: cannot be read ({error})"[:300]) from error


class Receiver:
    """What the route does."""

    def __init__(self, room: "EngineRoom") -> None:
        self.room, self._incoming, self._turn = room, Incoming(room.shapes), asyncio.Lock()

    async def weights(self, request: Request) -> Held:
        """422: these are no weights of this model; 503: the engine did not take them."""
        given = await read(request, WeightPart)
        async with self._turn:
            try:
                held, tensors = await asyncio.to_thread(self._incoming.take, given)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            if tensors is not None:
                try:
                    await asyncio.shield(self.room.load(tensors))
                except InfraError as error:
                    raise HTTPException(503, str(error)) from error
        return Held(held=held, version=self.room.version)
