"""A run with agents in processes of their own, a real engine and real updates, on two ranks; then
its models are served.
"""

import io
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image as pil
from starlette.testclient import TestClient
from transformers import AutoModelForImageTextToText

from megatron_rl.cli.serve import main as serve_main
from megatron_rl.config import ModelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.observe.viewer.store import label_folders
from megatron_rl.observe.viewer.web_app import create_app
from megatron_rl.rollout.episode import derive_seed
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.saved_model import find_saved_model
from megatron_rl.types import Rollout, TokenSequence
from megatron_rl.weights.formats.checkpoint_source import iterate_tensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.convert import verify
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.agent_runs import (
    NUM_EPISODES,
    NUM_STEPS,
    agent_overrides,
    check_equal_runs,
    check_logprobs,
    kill_with_agents,
    rollouts_of,
    train,
    write_questions,
)
from tests.support.agents.vowel_agent import converse

START_S = 120.0


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def run(random_model: Path, questions: Path) -> Path:
    """Train for three steps with an engine on each of two ranks."""
    folder = questions.parent / "run"
    train(2, *agent_overrides(questions, random_model, folder), "checkpoint.every=1", "checkpoint.keep_last=3")
    return folder


@pytest.mark.known_failure("agent-loses-images")
def test_engine_and_trainer_agree_on_every_sampled_token(run: Path) -> None:
    """In branches and with images, at every step."""
    check_logprobs(run)


def test_sessions_are_trees(run: Path) -> None:
    """Turns 0 and 1 share a sequence; turn 2 branches after turn 0; turns 3 and 4 have new prompts,
    the last one with a tool call."""
    found = [each for step in range(NUM_STEPS) for each in rollouts_of(run, step)]
    assert len(found) == NUM_STEPS * NUM_EPISODES
    for rollout in found:
        assert rollout.reason == "1 continued, 1 branched, 2 new prompts"
        assert [turn.sequence for turn in rollout.turns] == [0, 0, 1, 2, 3]
        first, branch, *_ = rollout.sequences
        stop = rollout.turns[0].token_span[1]
        assert first.token_ids[:stop] == branch.token_ids[:stop] and not any(branch.loss_mask[:stop])
        assert [len(context.images) for context in rollout.sequences] == [2, 2, 0, 2]
        text = "".join(turn.text for turn in rollout.turns)
        assert rollout.reward == pytest.approx(sum(letter in "aeiou" for letter in text) / max(1, len(text)))


def test_the_viewer_shows_branches_with_their_images(run: Path) -> None:
    """Prompt and observations are those that the agent sent: the question's image first, then blue,
    red in a branch, none in a new prompt, and the question's image with green in another."""
    client = TestClient(create_app(label_folders([run]), hosts=["testserver"]))
    told = client.get("/api/episode", params={"run": "run", "step": 1, "row_index": 0}).json()
    assert (told["no_words"], told["missing"]) == ("", []) and "number " in told["prompt"]
    *observed, last = told["turns"]
    assert [turn["is_new_prompt"] for turn in observed] == [False, True, True, True]
    for turn, text in zip(observed, ("and this?", "why?", "one more word", "look"), strict=True):
        assert text in turn["observation"]
    assert last["observation"] == "" and last["images"] == []

    def colors(images: list[dict]) -> list[tuple[int, ...]]:
        shown = (client.get(f"/picture/run/{image['key']}.png").content for image in images)
        return [pil.open(io.BytesIO(content)).convert("RGB").getpixel((9, 9)) for content in shown]

    (question,) = colors(told["first"])
    assert question in {(0, 128, 0), (255, 255, 0), (255, 255, 255)}
    assert [colors(turn["images"]) for turn in observed] == [[(0, 0, 255)], [(255, 0, 0)], [], [question, (0, 128, 0)]]


def test_every_branch_has_the_advantage_of_its_episode(run: Path) -> None:
    """All sampled tokens of an episode have one advantage, with the sign of reward minus mean."""
    by_group: dict[tuple[int, int], list[Rollout]] = {}
    for step in range(NUM_STEPS):
        for each in rollouts_of(run, step):
            by_group.setdefault((step, each.group), []).append(each)
    for members in by_group.values():
        rewards = [each.reward for each in members]
        mean = sum(rewards) / len(rewards)
        for each in members:
            values = {
                round(context.advantages[place], 6)
                for context in each.sequences
                for place, has_loss in enumerate(context.loss_mask)
                if has_loss
            }
            assert len(values) == 1
            assert max(rewards) == min(rewards) or (values.pop() > 0) == (each.reward > mean)


def test_a_killed_run_equals_one_that_was_not(run: Path, random_model: Path, questions: Path, tmp_path: Path) -> None:
    """Both ranks are killed with SIGKILL while agents of the second step are running. No process
    and no folder of an agent is left, and the resumed run equals the one that was not killed.
    """
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    overrides = (*agent_overrides(questions, random_model, folder), "checkpoint.every=1", "checkpoint.background=false")
    kill_with_agents(2, *overrides, after=folder / "checkpoints" / "step_00000001", temporary=temporary)
    assert not (folder / "checkpoints" / "step_00000003").exists()
    assert f"resume: {folder}/checkpoints/step_0000000" in train(2, *overrides)
    check_equal_runs(folder, run)


@dataclass
class Endpoint:
    """Served checkpoint after two steps, with the key that it requires and the log of requests."""

    url: str
    key: str
    log: Path
    process: fork_server.Process

    def post(self, messages: list[dict], **more: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        body = {"model": "policy", "messages": messages, **more}
        return httpx.post(f"{self.url}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)

    def read_log(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Endpoint]:
    key, log = run.parent / "key", run.parent / "log.jsonl"
    key.write_text("k" * 20)
    words = (run, "--checkpoint", 2, "--port", 0, "--token-file", key, "--log", log)
    process = fork_server.Process(ROOT / "launch" / "serve.py", *words)
    deadline, lines = time.monotonic() + START_S, []
    while not lines and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        lines = [line for line in process.output.read_text().splitlines(keepends=True) if line.startswith("http://") and line[-1] == "\n"]
    try:
        assert lines, process.output.read_text()
        yield Endpoint(lines[0].strip(), "k" * 20, log, process)
    finally:
        process.kill()


def test_the_served_model_samples_the_tokens_of_the_run(run: Path, served: Endpoint) -> None:
    """The conversations of the third step, with pictures, a tool call and the seeds of the run:
    prompts and responses of the endpoint have the token ids and images that the run recorded, and
    logprobs within 1e-4."""
    recorded = [each for each in rollouts_of(run, 2) if each.sample_index < 2]

    def play(rollout: Rollout) -> None:
        turns = iter(range(len(rollout.turns)))

        def ask(messages: list[dict], **more: object) -> str:
            seed = derive_seed(derive_seed(0, 2), rollout.group, rollout.sample_index, next(turns))
            answer = served.post(messages, seed=seed, **more)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        question = rollout.question.removeprefix("<image>")
        texts = converse(question, pil.open(run.parent / f"{question[-2]}.png"), ask)
        assert texts == "".join(turn.text for turn in rollout.turns)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(play, recorded))
    answered = {(*entry["prompt_token_ids"], *entry["responses"][0]["token_ids"]): entry for entry in served.read_log()}
    turns = [(rollout.sequences[turn.sequence], *turn.token_span) for rollout in recorded for turn in rollout.turns]
    assert len(turns) == 20
    for context, start, stop in turns:
        entry = answered[tuple(context.token_ids[:stop])]
        assert entry["prompt_token_ids"] == context.token_ids[:start]
        assert entry["images"] == [image.key for image in context.images][: len(entry["images"])]
        assert entry["responses"][0]["logprobs"] == pytest.approx(context.rollout_logprobs[start:stop], abs=1e-4)


def test_greedy_responses_are_those_of_hugging_face(run: Path, served: Endpoint) -> None:
    """Every token has the highest logit of Hugging Face's model with the weights of the checkpoint,
    among the tokens that may be sampled."""
    converse(
        "number 1?", pil.open(run.parent / "1.png"), lambda messages, **more: served.post(messages, temperature=0, **more).json()["id"]
    )
    entry = served.read_log()[-1]
    model = find_saved_model(run, checkpoint="2")
    hf = AutoModelForImageTextToText.from_pretrained(run / "final", dtype=torch.float32)
    source = open_source(model.weights, read_spec(str(model.hf_folder)), key="RUN")
    hf.load_state_dict({name: source.read(canonical_name(name)) for name in hf.state_dict()})
    renderer = Renderer(ModelSettings(path=str(run / "final"), min_pixels=3136, max_pixels=4000))
    colors = (pil.open(run.parent / "1.png"), pil.new("RGB", (84, 56), "green"))
    images = [renderer.image(picture.convert("RGB")) for picture in colors]
    prompt, response = entry["prompt_token_ids"], entry["responses"][0]["token_ids"]
    assert entry["images"] == [image.key for image in images] and len(response) > 1
    context = TokenSequence(token_ids=[*prompt, *response], images=images)
    logits = verify.compute_logits(hf, context, image_token_id=renderer.image_token_id)[len(prompt) - 1 : -1]
    logits[:, renderer.banned_ids] = -torch.inf
    assert logits.argmax(-1).tolist() == response


def test_models_of_a_run(run: Path) -> None:
    """The final model is the default, and its tensors equal those of the last checkpoint."""
    final, last = find_saved_model(run), find_saved_model(run, checkpoint="last")
    assert (final.weights, last.weights) == (run / "final", run / "checkpoints" / "step_00000003")
    assert find_saved_model(run / "final").weights == final.weights and find_saved_model(last.weights).weights == last.weights
    assert find_saved_model(run, checkpoint="best").weights == last.weights
    spec = read_spec(str(last.hf_folder))
    tensors = [dict(iterate_tensors(open_source(model.weights, spec, key="RUN"))) for model in (final, last)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_what_cannot_be_served_is_one_line(run: Path, served: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = served.url.split(":")[2].partition("/")[0]
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    other = tmp_path / "other" / "final"
    other.mkdir(parents=True)
    for file in (run / "final").iterdir():
        (other / file.name).symlink_to(file)
    (other.parent / "config.yaml").write_text((run / "config.yaml").read_text())
    config = (other / "config.json").read_text()
    (other / "config.json").unlink()
    (other / "config.json").write_text(config.replace('"qwen2_5_vl"', '"llava"'))
    for words, line in (
        ((tmp_path / "nothing",), f"RUN={tmp_path}/nothing: no such folder"),
        ((run.parent,), "contains no run: config.yaml is missing"),
        ((tmp_path,), "has no model yet: neither final/ nor checkpoints/"),
        ((run, "--checkpoint", "7"), "--checkpoint=7: "),
        ((run, "--checkpoint", "newest"), "--checkpoint=newest: choose one of final, last, best, or a number of steps (1, 2, 3)"),
        ((run / "final", "--checkpoint", "last"), "--checkpoint=last: selects a model of a run directory"),
        ((run, "--host", "0.0.0.0", "--port", "0"), "--host 0.0.0.0: without a token, any client may sample from the model"),
        ((run, "--port", port), f"--host=127.0.0.1 --port={port}: Address already in use"),
        ((run, "--port", "70000"), "--port=70000: must be between"),
        ((other, "--port", "0"), "llava"),
    ):  # fmt: skip
        assert serve_main([str(word) for word in words]) == 1
        *_, last = capfd.readouterr().err.splitlines()
        assert last.startswith("error: ") and line in last, last


def test_ctrl_c_stops_the_endpoint(served: Endpoint) -> None:
    assert httpx.get(f"{served.url}/models", trust_env=False).json()["error"]["code"] == "invalid_api_key"
    num = len(served.read_log())
    served.process.send_signal(signal.SIGINT)
    output, _ = served.process.communicate(60)
    assert served.process.returncode == 0 and "Traceback" not in output
    assert output.splitlines()[-1].startswith(f"stopped: {num} requests answered: ")
