"""An endpoint as the policy: a real vLLM server against our engine, and a scripted server whose
responses are counted by hand."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image as pil

from megatron_rl.config import EvaluationSettings, ModelSettings
from megatron_rl.errors import InfraError
from megatron_rl.evaluation.endpoint_policy import ChatConversation, EndpointClient, prepare_image, truncate_at_stop
from megatron_rl.io.jsonl import read_lines, write_lines_atomically
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Status, StopReason
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.data_files import make_png
from tests.support.fake_judge_server import JudgeReply, make_completion, serve_judge
from tests.support.vllm_servers import serve_openai

EVALUATE = ROOT / "launch" / "evaluate.py"
SIZES = ("model.min_pixels=3136", "model.max_pixels=4000")
ENGINE = ("engine.kv_cache_mib=16", "engine.max_model_len=512")
GAME = (*SIZES, "task=number_line", "task.max_turns=3", "task.max_new_tokens=6", "task.options.invalid=random", "run.seed=5")
LIMITS = EpisodeSettings(temperature=0.0, max_turns=3, max_new_tokens=6, max_sequence_tokens=512, max_images=2, seed=0)


@pytest.fixture(scope="module")
def url(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with the model's own weights and the pixel limits of a run's engine."""
    with serve_openai(random_model, pixels=(3136, 4000)) as served:
        yield served


def evaluated(out: Path, *words: str, code: int = 0) -> str:
    result = fork_server.run_script(EVALUATE, *words, f"run.dir={out}", timeout_s=240)
    assert result.returncode == code, result.stdout
    return result.stdout


def test_a_real_server_says_what_our_engine_says(url: str, random_model: Path, tmp_path: Path) -> None:
    """A vLLM server gives the same text in every turn of the 30 games as our engine, and hence the
    same scores. The server drops trailing bytes that form no complete character."""
    evaluated(tmp_path / "own", *GAME, *ENGINE, f"model.path={random_model}")
    evaluated(tmp_path / "far", *GAME, f"model.path={random_model}", f"evaluation.urls=[{url}]", "evaluation.chunk=11")
    own, far = (read_lines(tmp_path / name / "examples.jsonl") for name in ("own", "far"))
    for line in (*own, *far):
        line["responses"] = [[reply.rstrip("\ufffd") for reply in said] for said in line["responses"]]
    assert own == far and all(all(said) for line in own for said in line["responses"])
    found = {name: json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "far")}
    assert found["own"]["scores"] == found["far"]["scores"] and 0 < found["own"]["scores"]["success"] < 1
    stated = found["far"]["stated"]
    assert stated["weights"] == f"served by {url}" and stated["harness"] != found["own"]["stated"]["harness"]
    own_prompt, far_prompt = ((tmp_path / name / "prompt.txt").read_text() for name in ("own", "far"))
    assert own_prompt.startswith("<|im_start|>system\n") and own_prompt.endswith("<|im_start|>assistant\n") and "[56x56]" in own_prompt
    words = far_prompt.removeprefix("user: ").replace("[picture]", "")
    assert words.strip() and words.strip() in own_prompt.replace("[56x56]", ""), (own_prompt, far_prompt)
    assert stated["prompt"].startswith(f"{len(far_prompt)} characters") and stated["reward"] == "the task's own"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(10)]
    write_lines_atomically(tmp_path / "questions.jsonl", rows)
    return tmp_path / "questions.jsonl"


def asked_of(questions: Path, url: str, *words: str) -> tuple[str, ...]:
    own = ("task=vqa", f"task.data.train=[{questions}]", f"task.data.eval=[{questions}]", "model.path=someone", f"evaluation.urls=[{url}]")
    return (*own, "evaluation.outage_timeout_s=0.2", "evaluation.max_attempts=2", *words)


def test_replies_are_counted_and_faults_are_not(questions: Path, tmp_path: Path) -> None:
    """Right, wrong, empty and truncated responses are scored.

    An HTML page fails its episode, which is counted and repeated when the same command runs again.
    """
    is_well = False

    def behave(body: dict) -> JudgeReply:
        assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("someone", 0.0, 7)
        (message,) = body["messages"]
        number = int((message["content"] if isinstance(message["content"], str) else message["content"][0]["text"])[0])
        if number == 9 and not is_well:
            return JudgeReply("<html>busy</html>", headers={"Content-Type": "text/html"})
        if number == 8:
            return JudgeReply(json.dumps({"choices": [{"message": {"role": "assistant", "content": None}, "finish_reason": "length"}]}))
        return make_completion(f"<answer>{number + (1 if number < 6 else 2)}</answer>")

    with serve_judge(behave) as server:
        words = asked_of(questions, server.url, "task.max_new_tokens=7", "run.max_failed_fraction=0.2", "run.outage_timeout_s=0")
        said = evaluated(tmp_path / "out", *words)
        first = json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"]
        assert first["success"] == pytest.approx(6 / 9) and first["failed_fraction"] == pytest.approx(0.1)
        assert "1 responses were truncated at task.max_new_tokens" in said
        (failed,) = [
            each.rollout
            for each in read_recorded(tmp_path / "out" / "rollouts" / "step_000000.jsonl")
            if each.rollout.status is Status.FAILED
        ]
        assert failed.reward is None and "evaluation: failed after " in failed.reason
        is_well = True
        num_before = len(server.bodies)
        evaluated(tmp_path / "out", *words)
        assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"]["success"] == pytest.approx(0.6)
        assert len(server.bodies) == num_before + 10, "the chunk with the failure"
        evaluated(tmp_path / "out", *words)
        assert len(server.bodies) == num_before + 10, "nothing is left to play"


def test_mistakes_are_told_in_a_line(questions: Path, tmp_path: Path) -> None:
    """Invalid endpoint settings and an unreachable endpoint end with a one-line error."""

    def line(*words: str) -> str:
        return evaluated(tmp_path / "out", *words, code=1).splitlines()[-1]

    assert line(*asked_of(questions, "http://me:secret@x/v1")).startswith("error: evaluation.urls=...: contains @, ? or #; ")
    assert "error: evaluation.weights=w: an endpoint serves its own weights" in line(
        *asked_of(questions, "http://x/v1", "evaluation.weights=w")
    )
    down = line(*asked_of(questions, "http://127.0.0.1:9/v1", "run.outage_timeout_s=0"))
    assert down.startswith("error: evaluation: 10 of 10 episodes failed, run.max_failed_fraction=0.1; first reason: evaluation: ")


def test_a_conversation_in_messages() -> None:
    """The sent messages equal those written by hand: images are PNGs of their final size, tool
    messages have the user role, responses end after a stop text, a new prompt drops the old one,
    and the image limit is enforced."""
    replies = iter(["one </stop> two", "three", "four"])
    picture = pil.new("RGB", (60, 90), "red")

    async def talk(url: str) -> tuple[ChatConversation, list]:
        speaker = EndpointClient(EvaluationSettings(urls=[url]), ModelSettings(path="someone", min_pixels=3136, max_pixels=12800))
        talked = ChatConversation(speaker, LIMITS)
        sampling = SamplingSettings(6, 0.0, seed=3, stop=("</stop>",))
        ends = [
            await talked.start([{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "image", "image": picture}]}])
        ]
        assert await talked.generate(sampling) == "one </stop>" and talked.char_to_token(2) is None
        heard = [{"type": "text", "text": "T"}, {"type": "image", "image": picture}]
        ends.append(await talked.observe([{"role": "tool", "content": heard}], is_new_prompt=False))
        await talked.generate(sampling)
        ends.append(await talked.observe([{"role": "user", "content": [{"type": "image", "image": picture}]}], is_new_prompt=False))
        ends.append(await talked.observe([{"role": "user", "content": "anew"}], is_new_prompt=True))
        await talked.generate(sampling)
        await speaker.close()
        return talked, ends

    with serve_judge(lambda _: make_completion(next(replies))) as server:
        talked, ends = asyncio.run(talk(server.url))
    assert ends == [None, None, StopReason.MAX_IMAGES, None]
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["user"]]
    assert server.bodies[1]["messages"][2]["content"] == "one </stop>" and server.bodies[2]["messages"][0]["content"] == "anew"
    shown = server.bodies[1]["messages"][3]["content"]
    assert [part["type"] for part in shown] == ["text", "image_url"] and shown[1]["image_url"]["url"].startswith("data:image/png;base64,")
    sent = pil.open(io.BytesIO(base64.b64decode(shown[1]["image_url"]["url"].partition(",")[2])))
    assert sent.tobytes() == talked.sequences[0].images[1].pil.tobytes() and (sent.size, sent.getpixel((0, 0))) == (
        (56, 84),
        (255, 0, 0),
    )
    assert [(turn.text, turn.sequence, len(turn.images)) for turn in talked.turns] == [
        ("one </stop>", 0, 1),
        ("three", 0, 0),
        ("four", 1, 0),
    ]
    assert [body["seed"] for body in server.bodies] == [3, 3, 3]


@pytest.mark.parametrize("size", [(60, 90), (28, 28), (500, 20), (1000, 1000)])
def test_pictures_are_as_large_as_the_trainer_would_have_them(size: tuple[int, int], random_model: Path) -> None:
    """An image for an endpoint has the same size, pixels and key as one for the trainer."""
    model = ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800)
    own, ours = Renderer(model).image(pil.new("RGB", size, "blue")), prepare_image(pil.new("RGB", size, "blue"), model)
    assert (ours.grid, ours.key, ours.merge) == (own.grid, own.key, own.merge) and ours.pil.tobytes() == own.pil.tobytes()


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc", (), "abc"),
        ("a</x>b</y>", ("</y>", "</x>"), "a</x>"),
        ("a</y>b</x>", ("</y>", "</x>"), "a</y>"),
        ("", ("x",), ""),
        ("x", ("x",), "x"),
    ],
)
def test_a_reply_ends_at_the_first_of_these(text: str, stop: Sequence[str], expected: str) -> None:
    """A response is truncated after the first stop text."""
    assert truncate_at_stop(text, stop) == expected


def test_trouble_is_ours() -> None:
    """A server that rejects a request, hangs, or returns an invalid completion raises
    InfraError."""
    for reply in (
        JudgeReply("no", status=400),
        JudgeReply("{}"),
        JudgeReply("null"),
        JudgeReply('{"choices": []}'),
        JudgeReply("", delay_s=1.0),
    ):

        async def ask(url: str) -> None:
            speaker = EndpointClient(
                EvaluationSettings(urls=[url], max_attempts=1, timeout_s=0.5, outage_timeout_s=0), ModelSettings(path="m")
            )
            try:
                await speaker.generate([{"role": "user", "content": "?"}], SamplingSettings(5, 0.0, seed=1))
            finally:
                await speaker.close()

        with serve_judge(lambda _: reply) as server, pytest.raises(InfraError, match="evaluation: failed after 1 of 1 attempts"):  # noqa: B023
            asyncio.run(ask(server.url))


def test_a_published_benchmark_has_its_figures(tmp_path: Path) -> None:
    """Benchmark scores equal values computed by hand.

    There are two questions in two option orders, and the options are also shuffled. The policy
    always finds the right option of the first question and always answers A to the second. The
    first is right in both cycles; the second is right where the right option is at A.
    """
    picture = base64.b64encode(make_png()).decode()
    words = {"single": ("red", "blue", "green"), "cross": ("1", "2", "3")}
    rows = [
        {"index": number, "question": kind, **dict(zip("ABC", (given * 2)[cycle:], strict=False)), "answer": "ACB"[cycle], "category": kind,
         "cycle_category": cycle, "image": picture}
        for number, (kind, given, cycle) in enumerate((kind, given, cycle) for kind, given in words.items() for cycle in (0, 1))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "hr_bench.tsv", sep="\t", index=False)
    right_at: list[str] = []

    def behave(body: dict) -> JudgeReply:
        (message,) = body["messages"]
        shown = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        letters = {line[3:]: line[0] for line in shown.splitlines() if line[1:3] == ". "}
        if "red" in letters:
            return make_completion(f"<answer>{letters['red']}</answer>")
        right_at.append(letters["1"])
        return make_completion("<answer>A</answer>")

    with serve_judge(behave) as server:
        data = ("task.data.benchmark=hrbench", "task.data.shuffle_options=3", f"task.data.eval=[{tmp_path}/hr_bench.tsv]")
        said = evaluated(tmp_path / "out", "task=vqa", *data, "model.path=someone", f"evaluation.urls=[{server.url}]")
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    lucky = right_at.count("A")
    assert found["scores"]["official"] == pytest.approx((2 + lucky) / 4) and "official_low" in said
    assert (found["scores"]["category_single"], found["scores"]["category_cross"]) == (1.0, pytest.approx(lucky / 2))
    assert found["scores"]["official_low"] <= found["scores"]["official"] <= found["scores"]["official_high"]
    assert found["stated"]["benchmark"] == "hrbench, options shuffled with seed 3, up to 32 images"
    assert [line["credit"] for line in read_lines(tmp_path / "out" / "examples.jsonl")][:2] == [[1.0], [1.0]]
