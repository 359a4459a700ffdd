"""Tests that no request to the listener or the speaker gets a 500. The bodies are generated from
the schemas of their own OpenAPI pages and then damaged.

The test stands in for schemathesis, which is not among the packages of this project and was run by
hand (benchmarks/results/lewis_2026-11-23.md). Like it, the test draws from the schemas of the page
and checks the statuses.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits
from megatron_rl.tasks.lewis.server.speaker_app import SpeakerService, create_app
from megatron_rl.tasks.lewis.server.weight_updates import WeightUpdateHandler
from tests.support.fake_listener import build_app
from tests.support.model_server_process import encode_base64, encode_png, make_noise_image
from tests.tasks.lewis.server.test_speaker_app import Room as Speaking
from tests.tasks.lewis.server.test_weight_updates import SHAPES, TENSORS, Trained, part

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3), max_leaves=6,
)  # fmt: skip
PICTURE = encode_base64(encode_png(make_noise_image(1, side=28)))
TEXTS = st.sampled_from(
    [
        "0.png",
        "../0.png",
        "/etc/passwd",
        "\0",
        "a" * 64,
        PICTURE,
        encode_base64(encode_png(make_noise_image(2, side=28))),
        "",
        "\ud800",
        "mug",
    ]
)


def drawn(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for bodies of a JSON schema. Most of the bodies are valid."""
    if "anyOf" in schema:
        return st.one_of(*(drawn(each) for each in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "object":
        properties = {name: drawn(each) for name, each in schema.get("properties", {}).items()}
        needed = {name: properties.pop(name) for name in schema.get("required", [])}
        return st.fixed_dictionaries(needed, optional=properties)
    if kind == "array":
        return st.lists(drawn(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "integer":
        return st.integers(-2, 5)
    return TEXTS | st.text(max_size=30) if kind == "string" else ANYTHING


@st.composite
def spoilt(draw: st.DrawFn, schema: dict[str, Any]) -> bytes:
    body = draw(drawn(schema))
    how = draw(st.sampled_from(["as it is", "as it is", "a value", "a key", "a cut", "bytes", "anything"]))
    if how == "a value" and body:
        body[draw(st.sampled_from(sorted(body)))] = draw(ANYTHING)
    elif how == "a key":
        body[draw(st.text(max_size=5))] = draw(ANYTHING)
    elif how == "anything":
        body = draw(ANYTHING)
    content = json.dumps(body).encode()
    if how == "a cut":
        return content[: draw(st.integers(0, len(content)))]
    return draw(st.binary(max_size=40)) if how == "bytes" else content


class Saying(Speaking):
    """Speaker with the same description for every category. It accepts weights."""

    tensor_shapes = SHAPES

    def _prompt(self, messages: Any) -> str:
        return "mug"

    async def generate(self, context: str, sampling: object):
        from megatron_rl.rollout.engine import Completion

        return Completion(list(map(ord, "A photo of a mug.")), [], is_stopped=True, weight_versions=[])

    async def load_weights(self, tensors: object) -> None:
        return


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("pictures")
    (root / "0.png").write_bytes(encode_png(make_noise_image(0, side=28)))
    speaker = SpeakerService(Saying(), ImageCache([str(root)]), limits=RequestLimits(), name="s")
    return {
        "listener": build_app(Trained(), Path(root), receives_weights=True),
        "speaker": create_app(speaker, receiver=WeightUpdateHandler(Saying())),
    }


def status(app: Any, method: str, path: str, content: bytes, kind: str) -> int:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9000", transport=transport) as http:
            return await http.request(method, path, content=content, headers={"content-type": kind})

    return asyncio.run(ask()).status_code


SEEN: dict[str, set[int]] = {}


@pytest.mark.parametrize(
    "path", ["listener/score", "listener/batch_score", "listener/weights", "speaker/describe", "speaker/batch_describe"]
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_is_a_500(apps: dict[str, Any], path: str, data: st.DataObject) -> None:
    """A generated and possibly damaged body gets an expected status, never a 500."""
    name, route = path.split("/")
    app = apps[name]
    schema = app.openapi()["paths"][f"/{route}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    content = data.draw(spoilt(schema))
    kind = data.draw(st.sampled_from(["application/json", "application/json", "text/plain", "multipart/form-data"]))
    found = status(app, "POST", f"/{route}", content, kind)
    SEEN.setdefault(path, set()).add(found)
    assert found in ((200, 404, 413, 422) if kind == "application/json" else (415,)), (found, content)


def test_what_is_drawn_comes_through_and_is_refused(apps: dict[str, Any]) -> None:
    """The draws above reach a 422 on every route, and valid bodies get a 200. The body for
    listener/score has a single candidate and gets a 422."""
    assert all(422 in statuses for statuses in SEEN.values())
    good = {
        "listener/score": {"candidate_paths": ["0.png"], "candidates": [], "question": "x"},
        "listener/weights": part(0, 1, TENSORS).model_dump(),
        "speaker/describe": {"image_path": "0.png", "category": "mug"},
        "speaker/batch_describe": {"batch": [{"image": {"base64": PICTURE}, "category": "mug"}]},
    }
    statuses = {path: status(apps[path.split("/")[0]], "POST", f"/{path.split('/')[1]}", json.dumps(body).encode(), "application/json")
                for path, body in good.items()}  # fmt: skip
    assert statuses == {"listener/score": 422, "listener/weights": 200, "speaker/describe": 200, "speaker/batch_describe": 200}


def test_the_page_has_no_reference_that_leads_nowhere(apps: dict[str, Any]) -> None:
    """The OpenAPI pages describe the listener's candidates inline, because tools ignore references
    that they cannot resolve."""
    pages = [app.openapi() for app in apps.values()]
    assert all('"$ref": "#/$defs' not in json.dumps(page) for page in pages)
    score = pages[0]["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "path" in json.dumps(score["properties"]["candidates"]["items"])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST"])
def test_no_method_of_any_path_is_a_500(apps: dict[str, Any], method: str) -> None:
    for app in apps.values():
        for path in (*app.openapi()["paths"], "/", "/none", "/score/", "/docs", "/openapi.json"):
            assert status(app, method, path, b"", "application/json") in (200, 404, 405, 422)
