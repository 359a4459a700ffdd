"""Tests the health that a service reports while its weights change, with a stand-in for its
engine."""

import asyncio
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.errors import InfraError
from megatron_rl.tasks.lewis.server import engine_holder
from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder
from megatron_rl.types import SpecialTokens


class Engine:
    """Records the health of its holder while it loads weights. If `fails` is set, loading
    raises."""

    room: EngineHolder
    fails = False

    def __init__(self, *_: object, **__: object) -> None:
        self.weight_version, self.said = 0, []

    def run(self, stay: Coroutine) -> None:
        asyncio.run(stay)

    def load_weights(self, tensors: Iterator, *, version: int) -> None:
        self.said.append(self.room.is_healthy)
        if self.fails:
            raise RuntimeError("half of them")
        self.weight_version = version

    def close(self) -> None:
        pass


def test_a_service_is_well_while_its_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service is healthy while its weights change, because a run that starts at that moment would
    otherwise consider it broken. After a failed update it is unhealthy until the next successful
    one."""
    renderer = SimpleNamespace(special_tokens=SpecialTokens(image_token_id=0), final_pixels=(1, 2))
    for name, value in {
        "ColocatedEngine": Engine, "Renderer": lambda model, *, cache_bytes: renderer, "compute_folder_version": lambda *_: "first",
        "compute_tensors_version": lambda tensors, *_: f"{tensors['a'].item():g}",
    }.items():  # fmt: skip
        monkeypatch.setattr(engine_holder, name, value)
    room = EngineHolder(ModelSettings(path="nowhere"), EngineSettings())
    engine = room._engine
    engine.room = room
    try:
        asyncio.run(room.load_weights({"a": torch.tensor(1.0)}))
        assert (engine.said, room.is_healthy, room.version) == ([True], True, "1")
        engine.fails = True
        with pytest.raises(InfraError, match="half of them"):
            asyncio.run(room.load_weights({"a": torch.tensor(2.0)}))
        assert not room.is_healthy and room.version == "1"
        engine.fails = False
        asyncio.run(room.load_weights({"a": torch.tensor(3.0)}))
        assert room.is_healthy and room.version == "3"
    finally:
        room.close()
