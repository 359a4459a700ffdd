"""Tests the listener's application with an engine of known numbers: the scores it computes, the
order of its requests, and the limits on one client."""

import asyncio
import hashlib
import math
import weakref
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as pil

from megatron_rl.config import EngineSettings
from megatron_rl.data.images import StoredImage
from megatron_rl.tasks.lewis.listener_protocol import CandidateImage
from megatron_rl.tasks.lewis.server import engine_holder, listener_app
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.listener_app import MAX_RENDERED, MAX_RENDERED_PER_REQUEST, find_word_tokens, split_by_image_count
from megatron_rl.tasks.lewis.server.model_server import build_parser, run_server
from megatron_rl.tasks.lewis.server.model_version import compute_folder_version
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits
from tests.support.fake_listener import FakeEngineHolder, Renderer, Tokenizer, build_app, yes_probability
from tests.support.model_server_process import encode_base64, encode_png, make_noise_image

PICTURES = [make_noise_image(seed, side=28) for seed in range(6)]
FILES = [{"base64": encode_base64(encode_png(picture))} for picture in PICTURES]
HASHES = [{"sha256": hashlib.sha256(encode_png(picture)).hexdigest()} for picture in PICTURES]
Talk = Callable[[httpx.AsyncClient], Awaitable[Any]]


def talk(app: Any, *talks: Talk, at_once: bool = False) -> list[Any]:
    async def work() -> list[Any]:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9000", transport=httpx.ASGITransport(app), timeout=30) as http:
            return list(await asyncio.gather(*(each(http) for each in talks))) if at_once else [await each(http) for each in talks]

    return asyncio.run(work())


def scored(*candidates: dict[str, str], question: str = "This?", **more: Any) -> Talk:
    return lambda http: http.post("/score", json={"candidates": list(candidates), "question": question, **more})


def test_a_pick_and_its_reward_are_those_of_the_numbers() -> None:
    """Pick and reward equal hand-computed values for p(yes) of 0.6, 0.2, 0.1 and of 0.3, 0.1, where
    a candidate is recognized, and of 0.2, 0.25, where none is. Log-probabilities that underflow are
    probabilities of 0."""
    app = build_app(FakeEngineHolder(logprobs_fn=lambda p: [math.log(p), math.log(1 - p), -1000.0]))
    for ps, pick, reward in (((0.6, 0.2, 0.1), 0, 0.6 / 0.9), ((0.2, 0.25), 1, 0.5 * 0.25 / 0.45), ((0.3, 0.1), 0, 0.75)):
        given = iter(ps)
        app_room = FakeEngineHolder(logprobs_fn=lambda p, given=given: [(q := math.log(next(given))), math.log(1 - math.exp(q)), -1000.0])
        (answer,) = talk(build_app(app_room), scored(*FILES[: len(ps)], topk=len(ps)))
        told = answer.json()
        assert sorted(told["yes_probabilities"]) == pytest.approx(sorted(ps))
        assert told["yes_probabilities"][told["predicted_index"]] == pytest.approx(ps[pick])
        assert told["reward_score"] == pytest.approx(reward)
        assert [told["yes_probabilities"][index] for index in told["top_indices"]] == pytest.approx(sorted(ps, reverse=True))
    tiny = build_app(FakeEngineHolder(logprobs_fn=lambda p: [-1000.0 - p, 0.0, -5000.0]))
    (answer,) = talk(tiny, scored(*FILES[:2]))
    assert answer.json()["yes_probabilities"] == [0.0, 0.0] and 0.25 <= answer.json()["reward_score"] < 0.5
    assert talk(app, scored(*FILES[:2]))[0].status_code == 200


class Counting(FakeEngineHolder):
    """Counts the prompts that are alive, and keeps their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, weakref.WeakSet()
        self.renderer.prompt = self._prompt

    def _prompt(self, messages: Any) -> Any:
        context = Prompt(vars(Renderer.prompt(self.renderer, messages)))
        self._alive.add(context)
        self.most = max(self.most, len(self._alive))
        return context


class Prompt:
    def __init__(self, given: dict[str, Any]) -> None:
        vars(self).update(given)


def test_a_large_batch_is_rendered_as_it_is_scored() -> None:
    """A batch of 120 items with 2 to 5 candidates, 420 in total, never has more prompts alive than
    those of two slices. Every score equals the known one."""
    room, counts = Counting(), [2 + number % 4 for number in range(120)]
    batch = [{"candidates": HASHES[:count], "question": f"This {number}?"} for number, count in enumerate(counts)]
    sent, told = talk(build_app(room), scored(*FILES), lambda http: http.post("/batch_score", json={"batch": batch}))
    assert sent.status_code == told.status_code == 200 and room.most <= 2 * MAX_RENDERED_PER_REQUEST < sum(counts) == 420
    for number, (count, result) in enumerate(zip(counts, told.json()["results"], strict=True)):
        assert result["yes_probabilities"] == pytest.approx([yes_probability(picture, f"This {number}?") for picture in PICTURES[:count]])
    spoilt = [*batch, {"candidates": [HASHES[0], HASHES[0]], "question": "This?"}]
    (late,) = talk(build_app(FakeEngineHolder(), cache_bytes=1 << 20), lambda http: http.post("/batch_score", json={"batch": [
        {**each, "candidates": [FILES[HASHES.index(one)] for one in each["candidates"]]} for each in spoilt
    ]}))  # fmt: skip
    assert late.status_code == 422 and "item 120: candidates 0 and 1 are the same image" in late.text


def test_many_large_batches_are_rendered_two_slices_at_a_time() -> None:
    """Six concurrent requests of 42 items share one limit on rendered prompts, and each gets the
    known scores."""
    room, counts = Counting(), [2 + number % 4 for number in range(42)]
    batch = [{"candidates": HASHES[:count], "question": f"This {number}?"} for number, count in enumerate(counts)]
    app = build_app(room)
    talk(app, scored(*FILES))
    answers = talk(app, *[lambda http: http.post("/batch_score", json={"batch": batch})] * 6, at_once=True)
    assert MAX_RENDERED_PER_REQUEST < room.most <= MAX_RENDERED < 6 * MAX_RENDERED_PER_REQUEST
    for answer in answers:
        for number, (count, result) in enumerate(zip(counts, answer.json()["results"], strict=True)):
            assert result["yes_probabilities"] == pytest.approx(
                [yes_probability(picture, f"This {number}?") for picture in PICTURES[:count]]
            )


@pytest.mark.parametrize("counts", [[64] * 3, [2] * 256, [63, 2, 64, 1, 1, 62, 64], [64, 64, 2], [2]])
def test_slices_hold_every_item_once_in_order(counts: list[int]) -> None:
    found = split_by_image_count(counts)
    assert [place for part in found for place in part] == list(range(len(counts)))
    assert all(0 < sum(counts[place] for place in part) <= MAX_RENDERED_PER_REQUEST for part in found)
    assert all(sum(counts[place] for place in [*one, other[0]]) > MAX_RENDERED_PER_REQUEST for one, other in pairwise(found))


def test_every_way_of_saying_yes_counts() -> None:
    """All tokens that spell yes count toward p(yes)."""
    assert find_word_tokens(Tokenizer(), "yes") == [0, 3] and find_word_tokens(Tokenizer(), "no") == [2]
    (answer,) = talk(build_app(FakeEngineHolder()), scored(*FILES[:3]))
    assert answer.json()["yes_probabilities"] == pytest.approx([yes_probability(picture, "This?") for picture in PICTURES[:3]])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_number_is_an_error(number: float) -> None:
    """Log-probabilities that are NaN or infinite lead to a 503 and no score."""
    (answer,) = talk(build_app(FakeEngineHolder(logprobs_fn=lambda p: [number, number, number])), scored(*FILES[:2]))
    assert answer.status_code == 503 and "no finite logprob" in answer.text and answer.headers["retry-after"]


def test_who_shows_the_same_picture_waits_for_the_first() -> None:
    """With ten concurrent questions about the same three images, each image is first computed
    alone, once; then all other requests run together."""
    room = FakeEngineHolder(delay_s=0.05)
    talks = [scored(*FILES[:3], question=f"Is it {number}?") for number in range(10)]
    answers = talk(build_app(room, concurrency=32), *talks, at_once=True)
    assert [answer.status_code for answer in answers] == [200] * 10
    first = room.requests[:3]
    assert len({picture for picture, _ in first}) == 3 and len(room.requests) == 30 and len(set(room.requests)) == 30
    for number, answer in enumerate(answers):
        assert answer.json()["yes_probabilities"] == pytest.approx([yes_probability(each, f"Is it {number}?") for each in PICTURES[:3]])


def test_files_are_kept_as_long_as_there_is_room() -> None:
    """The cache has room for two files; a third replaces the least recently used one. One request
    may contain a hash and the file for it."""
    size = len(encode_png(PICTURES[0]))
    app = build_app(FakeEngineHolder(), cache_bytes=size * 5 // 2)
    sent, both, third, gone, there = talk(
        app, scored(*FILES[:2]), scored(HASHES[1], HASHES[0]), scored(HASHES[1], FILES[2]), scored(HASHES[0], HASHES[1]),
        lambda http: http.post("/batch_score", json={"batch": [
            {"question": "a", "candidates": [HASHES[3], HASHES[4]]}, {"question": "b", "candidates": [FILES[3], FILES[4]]},
        ]}),
    )  # fmt: skip
    assert (sent.status_code, both.status_code, third.status_code, there.status_code) == (200, 200, 200, 200)
    assert gone.status_code == 404 and gone.json()["detail"]["unknown"] == [HASHES[0]["sha256"]]


def test_a_file_that_is_asked_for_by_its_hash_is_used_by_that() -> None:
    """A request by hash counts as a use of the cached file. The cache has room for two files: after
    the older one is requested by its hash, a third file replaces the other one."""
    app = build_app(FakeEngineHolder(), cache_bytes=len(encode_png(PICTURES[0])) * 5 // 2)
    talks = [scored(*FILES[:2]), scored(HASHES[0], FILES[2]), scored(HASHES[0], HASHES[2]), scored(HASHES[0], HASHES[1])]
    *well, gone = talk(app, *talks)
    assert [answer.status_code for answer in well] == [200] * 3
    assert gone.status_code == 404 and gone.json()["detail"]["unknown"] == [HASHES[1]["sha256"]]


@pytest.mark.parametrize("way", ["path", "link", "folder"])
def test_a_folder_whose_name_begins_as_a_roots_is_outside_of_it(tmp_path: Path, way: str) -> None:
    """A folder lewis2 next to the root lewis cannot be read: not by its full path, nor through a
    link to its file, nor through a link to the folder. It can be read if it is a second root."""
    root, sibling = tmp_path / "lewis", tmp_path / "lewis2"
    for folder in (root, sibling):
        folder.mkdir()
        (folder / "0.png").write_bytes(encode_png(PICTURES[0]))
    (root / "link.png").symlink_to(sibling / "0.png")
    (root / "linked").symlink_to(sibling)
    path = {"path": str(sibling / "0.png"), "link": "link.png", "folder": "linked/0.png"}[way]
    inside, outside = CandidateImage(path="0.png"), CandidateImage(path=path)
    pictures = ImageCache([str(root)])
    assert pictures.read_image(inside, where="item 0")[1].tobytes() == PICTURES[0].tobytes()
    with pytest.raises(ValueError, match=r"^item 0: is outside of this server's roots$"):
        pictures.read_image(outside, where="item 0")
    assert ImageCache([str(root), str(sibling)]).read_image(outside, where="item 0")[0] == HASHES[0]["sha256"]


@pytest.mark.parametrize("size", [(5793, 5793), (1 << 16, 656)])
def test_a_picture_of_too_many_pixels_is_not_decoded(size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of more than 2 ** 25 pixels are refused without being decoded. At one bit per pixel,
    their files are small."""
    pil.new("1", size).save(tmp_path / "wide.png")
    monkeypatch.setattr(StoredImage, "open", lambda self: pytest.fail("it is decoded"))
    with pytest.raises(ValueError, match=rf"^item 0: has {size[0]}x{size[1]} pixels, more than 33554432$"):
        ImageCache([str(tmp_path)]).read_image(CandidateImage(path="wide.png"), where="item 0")


def test_requests_that_fail_give_their_slots_back() -> None:
    """With a single slot, requests that cannot be answered or that take too long free the slot for
    the next request."""
    hidden = [{"sha256": "0" * 64}]
    refused = [scored(FILES[0], FILES[0]), scored(FILES[0], *hidden), scored(FILES[0], {"base64": "AAAA"})]
    *bad, good = talk(build_app(FakeEngineHolder(), concurrency=1, acquire_s=0.5), *refused, scored(*FILES[:2]))
    assert [answer.status_code for answer in bad] == [422, 404, 422] and good.status_code == 200
    late, later = talk(build_app(FakeEngineHolder(delay_s=5), concurrency=1, acquire_s=0.5, timeout_s=0.2), *[scored(*FILES[:2])] * 2)
    assert "took longer than" in late.text and "took longer than" in later.text


def test_no_probability_is_above_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probability of yes is at most 1, even if the sum over all forms of yes is rounded up and
    is the whole mass."""
    exact = listener_app.logsumexp
    monkeypatch.setattr(listener_app, "logsumexp", lambda logprobs: exact(logprobs) + (3e-16 if len(logprobs) == 2 else 0.0))
    (answer,) = talk(build_app(FakeEngineHolder(logprobs_fn=lambda p: [math.log(0.25), -1000.0, math.log(0.75)])), scored(*FILES[:2]))
    assert answer.status_code == 200 and answer.json()["yes_probabilities"] == [1.0, 1.0]


def test_the_token_is_asked_for() -> None:
    app = build_app(FakeEngineHolder(), token="a-word-of-many-letters")
    plain, told = talk(
        app, scored(*FILES[:2]),
        lambda http: http.get("/health", headers={"Authorization": "Bearer a-word-of-many-letters"}),
    )  # fmt: skip
    assert plain.status_code == 401 and told.json()["status"] == "ok"


def test_too_many_at_once_wait_and_are_then_refused() -> None:
    """With INFERENCE_CONCURRENCY of 1 and requests of 0.3 s, a request waits at most
    INFERENCE_ACQUIRE_TIMEOUT, 0.5 s, and is then refused with 503."""
    talks = [scored(*FILES[:2], question=f"Is it {number}?") for number in range(6)]
    slow = build_app(FakeEngineHolder(delay_s=0.3), concurrency=1, acquire_s=0.5)
    statuses = [answer.status_code for answer in talk(slow, *talks, at_once=True)]
    assert 1 <= statuses.count(200) <= 3 and statuses.count(503) == 6 - statuses.count(200)
    patient = build_app(FakeEngineHolder(delay_s=0.3), concurrency=6, acquire_s=0.5)
    assert [answer.status_code for answer in talk(patient, *talks, at_once=True)] == [200] * 6


def test_work_that_takes_too_long_is_given_up() -> None:
    answers = talk(build_app(FakeEngineHolder(delay_s=30), timeout_s=0.2), scored(*FILES[:2]), lambda http: http.get("/metrics"))
    assert answers[0].status_code == 503 and "took longer than 0.2 s" in answers[0].text
    assert 'listener_refused_total{reason="late"} 1.0' in answers[1].text


def test_a_body_has_its_limit() -> None:
    (answer,) = talk(build_app(FakeEngineHolder(), body_bytes=1000), scored(*FILES[:2]))
    assert answer.status_code == 413


def test_an_engine_that_failed_is_told() -> None:
    health, _ = talk(build_app(FakeEngineHolder(is_healthy=False)), lambda http: http.get("/health"), lambda http: http.get("/metrics"))
    assert health.status_code == 503 and "restart the server" in health.text


def test_the_version_is_that_of_everything(tmp_path: Path) -> None:
    """The version changes with one byte of one file, with a file name, and with the image
    processing."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    versions = [compute_folder_version(tmp_path, 1), compute_folder_version(tmp_path, 1), compute_folder_version(tmp_path, 2)]
    (tmp_path / "model.safetensors").write_bytes(bytes(999) + b"\1")
    versions.append(compute_folder_version(tmp_path, 1))
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    versions.append(compute_folder_version(tmp_path, 1))
    assert versions[0] == versions[1] and len(set(versions)) == 4


def test_one_that_takes_weights_asks_for_a_token(capsys: pytest.CaptureFixture) -> None:
    """Finding 6: a service that accepts weights does not start without a token. Formerly anyone who
    reached the port could replace the model that computes the reward."""
    assert run_server("listener", build_app, description="", port=0, arguments=["--model", "m", "--trained"]) == 1
    said = "listener: --trained=True: lets anyone who reaches the port replace the model; also pass --token-file FILE\n"
    assert capsys.readouterr().err == said


def test_the_seeds_variables_are_words_of_the_command_line() -> None:
    """Each environment variable of the seed is the default of a command-line option, which
    overrides it. A log is written only if both DEBUG_MODE and LOG_PATH request it."""
    variables = {"INFERENCE_CONCURRENCY": "3", "INFERENCE_ACQUIRE_TIMEOUT": "7.5", "LISTENER_BATCH_SIZE": "11"}

    def words(given: dict[str, str], *more: str) -> tuple[object, ...]:
        read = build_parser("", port=9000, variables=given).parse_args(["--model", "m", *more])
        return read.concurrency, read.acquire_timeout, read.batch_size, read.log

    assert words({}) == (8, 300.0, 64, None)
    assert words(variables) == (3, 7.5, 11, None)
    assert words(variables, "--concurrency", "5", "--batch-size", "6") == (5, 7.5, 6, None)
    assert words({"LOG_PATH": "x"}) == words({"DEBUG_MODE": "true"}) == words({"DEBUG_MODE": "false", "LOG_PATH": "x"}) == words({})
    assert words({"DEBUG_MODE": "true", "LOG_PATH": "x"})[3] == Path("x")


def test_the_seeds_variables_reach_the_engine_and_the_limits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The seed's environment variables pass through the whole command line to the settings of the
    engine and the limits of the routes."""
    engines: list[EngineSettings] = []

    class Taken(FakeEngineHolder):
        def __init__(self, model: object, settings: EngineSettings) -> None:
            engines.append(settings)

        def close(self) -> None: ...

    def make(room: FakeEngineHolder, pictures: object, *, limits: RequestLimits, log: Path | None, **_: object) -> object:
        raise ValueError(f"{limits.concurrency} at once, {limits.acquire_s:g} s, {log}")

    monkeypatch.setattr(engine_holder, "EngineHolder", Taken)
    variables = {"INFERENCE_CONCURRENCY": "3", "INFERENCE_ACQUIRE_TIMEOUT": "7.5", "LISTENER_BATCH_SIZE": "11", "DEBUG_MODE": "1"}
    for name, value in {**variables, "LOG_PATH": "said.jsonl"}.items():
        monkeypatch.setenv(name, value)
    assert run_server("listener", make, description="", port=0, arguments=["--model", "m"]) == 1
    assert capsys.readouterr().err == "listener: 3 at once, 7.5 s, said.jsonl\n" and engines[0].max_num_seqs == 11
