"""Tests weights that arrive by HTTP, and the publisher that sends them. An update applies
completely or not at all, and never during a request."""

import asyncio
import base64
import math
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from megatron_rl.config import WeightPublishSettings
from megatron_rl.errors import InfraError
from megatron_rl.rollout.weight_publisher import WeightPublisher
from megatron_rl.tasks.lewis.server.model_version import compute_tensors_version
from megatron_rl.tasks.lewis.server.read_write_lock import ReadWriteLock
from megatron_rl.tasks.lewis.server.weight_updates import PublishedWeightReceiver, WeightPart
from tests.support.fake_listener import FakeEngineHolder, build_app
from tests.support.hostile_server import serve_hostile
from tests.support.listener_clients import serve_listener
from tests.support.model_server_process import encode_base64, encode_png, make_noise_image

SHAPES = {"model.language_model.norm.weight": (3,), "model.visual.patch.weight": (2, 2), "lm_head.weight": (4, 3)}
TENSORS = {name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for name, shape in SHAPES.items()}
RELEASED = {"model.language_model.norm.weight": "model.norm.weight", "model.visual.patch.weight": "visual.patch.weight"}


def part(number: int, parts: int, tensors: dict[str, torch.Tensor], *, update: str = "u") -> WeightPart:
    return WeightPart(update=update, part=number, parts=parts, safetensors=base64.b64encode(save(tensors)).decode())


def some(*places: int) -> dict[str, torch.Tensor]:
    names = list(TENSORS)
    return {names[place]: TENSORS[names[place]] for place in places}


def test_all_parts_are_an_update_whatever_the_names_are_spelled_like() -> None:
    """Parts with released or internal names form one complete update."""
    incoming = PublishedWeightReceiver(SHAPES)
    first = {RELEASED.get(name, name): tensor for name, tensor in some(0, 1).items()}
    assert incoming.add_part(part(0, 2, first)) == (1, None)
    held, tensors = incoming.add_part(part(1, 2, some(2)))
    assert held == 2 and tensors.keys() == SHAPES.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in SHAPES)
    assert incoming.add_part(part(0, 1, TENSORS, update="next"))[1].keys() == SHAPES.keys()


def test_the_first_part_of_another_update_begins_anew() -> None:
    """The first part of another update discards the unfinished one."""
    incoming = PublishedWeightReceiver(SHAPES)
    incoming.add_part(part(0, 2, some(0, 1)))
    incoming.add_part(part(0, 2, some(0), update="v"))
    with pytest.raises(ValueError, match="part 1 of 2 of u: part 1 of v is expected"):
        incoming.add_part(part(1, 2, some(2)))
    assert incoming.add_part(part(1, 2, some(1, 2), update="v"))[1].keys() == SHAPES.keys()


BROKEN = {
    "a tensor that is not the model's": ({**some(0, 1, 2), "model.other": torch.zeros(1)}, "model.other: is not a tensor of this model"),
    "another shape": ({**some(0, 1), "lm_head.weight": torch.zeros(3, 4)}, r"lm_head.weight: has shape \(3, 4\)"),
    "what is no number": (
        {**some(0, 1), "lm_head.weight": torch.full((4, 3), math.nan)},
        "lm_head.weight: contains values that are not finite numbers",
    ),
    "whole numbers": (
        {**some(0, 1), "lm_head.weight": torch.zeros(4, 3, dtype=torch.int64)},
        "lm_head.weight: contains values that are not finite",
    ),
    "one is missing": (some(0, 2), "1 tensors are missing: model.visual.patch.weight"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_all_of_this_model_is_refused(case: str) -> None:
    """An incomplete, foreign or non-finite tensor set is refused as a whole, and the next update is
    accepted."""
    tensors, said = BROKEN[case]
    incoming = PublishedWeightReceiver(SHAPES)
    with pytest.raises(ValueError, match=said):
        incoming.add_part(part(0, 1, tensors))
    with pytest.raises(ValueError, match="is expected"):  # nothing of the refused update is left
        incoming.add_part(part(1, 2, some(0)))
    assert incoming.add_part(part(0, 1, TENSORS))[1].keys() == SHAPES.keys()


def test_a_tensor_comes_once_and_a_part_in_its_turn() -> None:
    """A repeated tensor, a part out of order and an unreadable part raise ValueError."""
    incoming = PublishedWeightReceiver(SHAPES)
    incoming.add_part(part(0, 3, some(0)))
    with pytest.raises(ValueError, match="norm.weight: was already sent"):
        incoming.add_part(part(1, 3, some(0, 1)))
    incoming.add_part(part(0, 3, some(0)))
    with pytest.raises(ValueError, match="part 2 of 3 of u: part 1 of u is expected"):
        incoming.add_part(part(2, 3, some(2)))
    for text in ("?", base64.b64encode(b"no such file").decode(), base64.b64encode(save(TENSORS)[:-5]).decode()):
        with pytest.raises(ValueError, match="safetensors: cannot be read"):
            PublishedWeightReceiver(SHAPES).add_part(WeightPart(update="u", part=0, parts=1, safetensors=text))


def test_who_changes_waits_for_all_who_read_and_lets_none_begin() -> None:
    """A writer waits for all readers, and no reader begins while the writer waits. The oracle is
    the order of events with two readers of different lengths and one that arrives while the writer
    waits."""
    happened: list[str] = []

    async def read(standing: ReadWriteLock, name: str, seconds: float) -> None:
        async with standing.read_lock():
            happened.append(f"{name} begins")
            await asyncio.sleep(seconds)
            happened.append(f"{name} ends")

    async def change(standing: ReadWriteLock) -> None:
        async with standing.write_lock():
            happened.append("change begins")
            await asyncio.sleep(0.05)
            happened.append("change ends")

    async def main() -> None:
        standing = ReadWriteLock()
        begun = [asyncio.create_task(read(standing, "short", 0.02)), asyncio.create_task(read(standing, "long", 0.1))]
        await asyncio.sleep(0.01)
        begun.append(asyncio.create_task(change(standing)))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*begun, read(standing, "late", 0.0)), 10)

    asyncio.run(main())
    assert happened[2:4] == ["short ends", "long ends"]
    assert happened[4:] == ["change begins", "change ends", "late begins", "late ends"]


def test_a_version_is_that_of_every_bit() -> None:
    """The version depends on each bit, name, shape and dtype, but not on the order of the
    tensors."""
    changed = {**TENSORS, "lm_head.weight": TENSORS["lm_head.weight"].clone()}
    changed["lm_head.weight"].view(-1).view(torch.uint8)[0] ^= 1
    versions = [compute_tensors_version(TENSORS, 1), compute_tensors_version(TENSORS, 2), compute_tensors_version(changed, 1)]
    assert len({*versions}) == 3
    others = [  # the same bytes in the same order
        {"lm_head_weight" if name == "lm_head.weight" else name: tensor for name, tensor in TENSORS.items()},
        {name: tensor.reshape(-1) for name, tensor in TENSORS.items()},
        {name: tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor.view(torch.int16) for name, tensor in TENSORS.items()},
    ]
    assert len({*versions, *(compute_tensors_version(each, 1) for each in others)}) == 6
    assert compute_tensors_version(dict(reversed(TENSORS.items())), 1) == versions[0]


class Trained(FakeEngineHolder):
    """Engine holder with the sum of its weights as version."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_shapes, self.standing, self.loads, self.fails = SHAPES, ReadWriteLock(), 0, False

    @asynccontextmanager
    async def hold_weights(self):
        async with self.standing.read_lock():
            yield self.version

    async def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.fails:
            raise InfraError("the engine failed to load the weights")
        async with self.standing.write_lock():
            self.version, self.loads = f"{sum(tensor.sum().item() for tensor in tensors.values()):g}", self.loads + 1


def pairs(factor: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor * factor) for name, tensor in TENSORS.items())


SUM = sum(tensor.sum().item() for tensor in TENSORS.values())


def test_a_run_sends_its_weights_and_they_answer(tmp_path: Path) -> None:
    """A run publishes its weights in one part and in three, and a response has the version of these
    weights. With every=3, nothing is published at step 4."""
    room, told, token = Trained(), [], tmp_path / "token"
    token.write_text("a-word-of-many-letters\n")
    with serve_listener(room, receives_weights=True, token="a-word-of-many-letters") as url:
        for part_mib, factor in ((16.0, 2.0), (1e-5, 3.0)):
            settings = WeightPublishSettings(urls=[url], every=3, chunk_mib=part_mib, token_file=str(token))
            audience = WeightPublisher(settings, run="runs/a", is_main=True, log=told.append)
            assert audience.publish(lambda: pairs(100.0), step=4) == {}
            assert audience.publish(lambda factor=factor: pairs(factor), step=6) == {"weight_publish/num_behind": 0.0}
            candidates = [{"base64": encode_base64(encode_png(make_noise_image(seed, side=28)))} for seed in range(2)]
            body = {"candidates": candidates, "question": "This?"}
            answer = httpx.post(f"{url}/score", json=body, headers={"Authorization": f"Bearer {token.read_text().strip()}"}, timeout=30)
            assert answer.json()["version"] == f"{SUM * factor:g}"
    assert room.loads == 2 and told == []


def test_a_service_that_does_not_take_them_is_told_of_and_the_others_have_them() -> None:
    """A service that refuses the weights or is unreachable is logged and counted as behind. The
    other services receive them."""
    room, plain, told = Trained(), FakeEngineHolder(), []
    with serve_listener(room, receives_weights=True) as url, serve_listener(plain) as without:
        urls = [url, without, "http://127.0.0.1:9"]
        audience = WeightPublisher(WeightPublishSettings(urls=urls, max_attempts=2, timeout_s=5.0), run="r", is_main=True, log=told.append)
        assert audience.publish(pairs, step=1) == {"weight_publish/num_behind": 2.0}
        bad = WeightPublisher(WeightPublishSettings(urls=[url]), run="r", is_main=True, log=told.append)
        assert bad.publish(lambda: iter([("lm_head.weight", torch.zeros(4, 3))]), step=1) == {"weight_publish/num_behind": 1.0}
    assert room.loads == 1 and room.version == f"{SUM:g}"
    assert "HTTP 404" in told[0] and "--trained" in told[0] and "127.0.0.1:9" in told[1] and "2 tensors are missing" in told[2]


def test_a_service_that_asks_for_a_token_is_no_outage() -> None:
    """A 401 raises a ValueError that names the setting for the token. A response in drops only
    counts as behind."""
    told: list[str] = []
    with serve_listener(Trained(), receives_weights=True, token="a-word-of-many-letters") as url:
        audience = WeightPublisher(WeightPublishSettings(urls=[url]), run="r", is_main=True, log=told.append)
        with pytest.raises(
            ValueError,
            match=rf"^weight_publish.urls={url}: responds with HTTP 401 .*; set the service's token: weight_publish.token_file=FILE$",
        ):
            audience.publish(pairs, step=1)
    with serve_hostile("body by drops") as url:
        audience = WeightPublisher(WeightPublishSettings(urls=[url], max_attempts=1, timeout_s=0.3), run="r", is_main=True, log=told.append)
        assert audience.publish(pairs, step=1) == {"weight_publish/num_behind": 1.0}
    assert told == [f"weight_publish: {url}: no complete response within 0.3 s"]


def test_weights_that_the_engine_does_not_take_are_told_of_and_may_come_again() -> None:
    """If the engine fails to load the weights, the failure is logged, and the next update
    succeeds."""
    room, told = Trained(), []
    room.fails = True
    with serve_listener(room, receives_weights=True) as url:
        audience = WeightPublisher(WeightPublishSettings(urls=[url], max_attempts=1), run="r", is_main=True, log=told.append)
        assert audience.publish(pairs, step=1) == {"weight_publish/num_behind": 1.0}
        assert told == [f'weight_publish: {url}: HTTP 503: {{"detail":"the engine failed to load the weights"}}']
        room.fails = False
        assert audience.publish(pairs, step=2) == {"weight_publish/num_behind": 0.0} and room.loads == 1


def test_another_rank_takes_its_part_in_making_them_and_sends_nothing() -> None:
    """Ranks other than the main one iterate over the weights and send nothing."""
    read: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs():
            read.append(name)
            yield name, tensor

    audience = WeightPublisher(WeightPublishSettings(urls=["http://127.0.0.1:9"]), run="r", is_main=False)
    assert audience.publish(watched, step=1) == {} and read == list(TENSORS)
    assert WeightPublisher(WeightPublishSettings(), run="r", is_main=True).publish(watched, step=1) == {} and read == list(TENSORS)


def test_weights_are_taken_only_where_a_run_sends_them() -> None:
    async def ask(app: Any) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9000", transport=httpx.ASGITransport(app)) as http:
            body = part(0, 1, TENSORS).model_dump()
            return [await http.post("/weights", json=body), await http.post("/weights", json={**body, "parts": 0})]

    answers = asyncio.run(ask(build_app(Trained(), receives_weights=True)))
    assert [answer.status_code for answer in answers] == [200, 422] and answers[0].json() == {"held": 1, "version": f"{SUM:g}"}
    assert [answer.status_code for answer in asyncio.run(ask(build_app(Trained())))] == [404, 404]
