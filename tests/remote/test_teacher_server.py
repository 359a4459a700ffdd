"""A teacher on a real vLLM server: its logprobs against Hugging Face's model, in a client and in a
whole run; replies and servers that are refused."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.batching.privileged import PrivilegedPrompt
from megatron_rl.build import build_privileged_prompt
from megatron_rl.clients.endpoint_pool import InvalidReply, RequestRejected
from megatron_rl.config import DistillSettings, ModelSettings, TeacherServerSettings
from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.teacher_client import TeacherClient, TeacherClients, parse_scores
from megatron_rl.types import Rollout, TokenSequence
from megatron_rl_sandbox.bounded_http import BoundedClient
from megatron_rl_tools.convert import verify
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.e2e.test_distill_run import COEF, SMALL, TRAIN, with_patches
from tests.support.game_runs import GAME_OVERRIDES
from tests.support.json_server import server_url, start_server, stop_server
from tests.support.packed_example import make_picture, user_message
from tests.support.vllm_servers import serve_openai

PIXELS = {"min_pixels": 12000, "max_pixels": 13000}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "random"
    make_checkpoint(folder, init="random", seed=7, layers=6)
    return folder


@pytest.fixture(scope="module")
def url(teacher: Path) -> Iterator[str]:
    pixels = Renderer(ModelSettings(path=str(teacher), **PIXELS)).final_pixels
    with serve_openai(teacher, pixels=pixels) as url:
        yield url.removesuffix("/v1")


def hf_logprobs(teacher: Path, sequence: TokenSequence, renderer: Renderer) -> list[float]:
    """Return the logprob of each token but the first, over the whole vocabulary."""
    model = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        logp = verify.compute_logits(model, sequence, image_token_id=renderer.image_token_id).log_softmax(-1)
    return logp[:-1].gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0].tolist()


def make_sequence(renderer: Renderer) -> TokenSequence:
    """Return two turns with two images."""
    sequence = renderer.prompt([user_message("Look.", make_picture(1, 140, 84)), user_message("And here.", make_picture(2, 84, 140))])
    sequence.extend([11, 12, 13], logprobs=[-1.0, -1.0, -1.0])
    sequence.extend([14, 15])
    sequence.extend([16], logprobs=[-2.0])
    return sequence


def test_logprobs_are_those_of_hugging_face(url: str, teacher: Path) -> None:
    """Every token's logprob equals Hugging Face's within 1e-4, and only sampled tokens get one."""
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    client, sequence = TeacherClient(TeacherServerSettings(urls=[url]), image_token_id=renderer.image_token_id), make_sequence(renderer)
    unsampled = renderer.prompt([user_message("Nothing follows.")])

    async def use() -> list[float]:
        await client.start(renderer.tokenizer.encode)
        await client.add_logprobs([sequence, unsampled])
        found = await client.score(sequence)
        await client.close()
        return [score.logprob for score in found]

    found, expected = asyncio.run(use()), hf_logprobs(teacher, sequence, renderer)
    assert found[0] == 0.0 and found[1:] == pytest.approx(expected, abs=1e-4)
    assert sequence.teacher_logprobs == [value * mask for value, mask in zip(found, sequence.loss_mask, strict=True)]
    assert unsampled.teacher_logprobs == []


def test_each_data_source_has_its_own_servers(url: str, teacher: Path) -> None:
    """One source has the real server, another one a server that fails, and a third one has none."""
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    settings = TeacherServerSettings(urls_by_source={"a": [url], "b": ["http://127.0.0.1:9"]}, max_attempts=1, outage_timeout_s=0.0)
    clients = TeacherClients(settings, image_token_id=renderer.image_token_id)
    rollouts = [Rollout("t", "0", 0, 0, source=source, sequences=[make_sequence(renderer)]) for source in "abc"]

    async def use() -> None:
        with pytest.raises(InfraError):
            await clients.start(renderer.tokenizer.encode)
        await clients.add_logprobs(rollouts[0])
        with pytest.raises(InfraError):
            await clients.add_logprobs(rollouts[1])
        await clients.add_logprobs(rollouts[2])
        await clients.close()

    asyncio.run(use())
    first, second, third = (rollout.sequences[0] for rollout in rollouts)
    expected = [0.0, *hf_logprobs(teacher, first, renderer)]
    assert first.teacher_logprobs == pytest.approx([x * mask for x, mask in zip(expected, first.loss_mask, strict=True)], abs=1e-4)
    assert second.teacher_logprobs == third.teacher_logprobs == []
    with pytest.raises(ValueError, match=r"^distill.server.urls_by_source.a=\.\.\.: contains @"):
        TeacherServerSettings(urls_by_source={"a": ["http://me:pa55@one:8000"]})


def test_a_run_learns_from_the_server(torchrun, url: str, teacher: Path, random_model: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """Recorded logprobs of the teacher equal Hugging Face's to 1e-4, and each advantage is that of
    RLOO plus coef * (teacher logprob - old logprob)."""
    given = ("distill.apply_to=reward", f"distill.coef={COEF}", f"distill.server.urls=[{url}]", "rollouts.save=all", "run.steps=1")
    torchrun(2, TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *GAME_OVERRIDES, *SMALL, "algo=rloo", *given)
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    sums = {group: sum(r.reward for r in rollouts if r.group == group) for group in {r.group for r in rollouts}}
    sampled = []
    for rollout in rollouts:
        own = 2 * rollout.reward - sums[rollout.group]  # the difference from the other of two rollouts
        for sequence in rollout.sequences:
            expected = [0.0, *hf_logprobs(teacher, with_patches(sequence, renderer), renderer)]
            for place in (place for place, mask in enumerate(sequence.loss_mask) if mask):
                assert sequence.teacher_logprobs[place] == pytest.approx(expected[place], abs=1e-4)
                sampled.append(sequence.old_logprobs[place] - expected[place])
                assert sequence.advantages[place] == pytest.approx(own - COEF * sampled[-1], abs=1e-4)
    step, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rollouts) == 4 and step["distill/reverse_kl"] == pytest.approx(sum(sampled) / len(sampled), abs=1e-4)


def test_top_tokens_are_those_of_hugging_face(url: str, teacher: Path) -> None:
    """The five most probable tokens at each sampled token, and a server that returns fewer."""
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    sequence, settings = make_sequence(renderer), TeacherServerSettings(urls=[url])

    async def use(top_k: int) -> None:
        client = TeacherClient(settings, image_token_id=renderer.image_token_id, top_k=top_k)
        try:
            await client.start(renderer.tokenizer.encode)
            await client.add_logprobs([sequence])
        finally:
            await client.close()

    asyncio.run(use(5))
    top, places = sequence.teacher_top, [place for place, mask in enumerate(sequence.loss_mask) if mask]
    assert top is not None
    model = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        logp = verify.compute_logits(model, sequence, image_token_id=renderer.image_token_id).log_softmax(-1)
    best = logp[[place - 1 for place in places]].topk(5)
    assert [*top.token_ids] == best.indices.flatten().tolist()
    assert [*top.logprobs] == pytest.approx(best.values.flatten().tolist(), abs=1e-4)
    with pytest.raises(PermanentInfraError, match=r"HTTP 400: .*; start the server with --max-logprobs 64, or set a smaller distill.top_k"):
        asyncio.run(use(64))


def test_a_run_sends_the_privileged_prompt(torchrun, url: str, teacher: Path, random_model: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """Recorded logprobs of the teacher equal Hugging Face's after the prompt, to 1e-4."""
    given = ("distill.apply_to=reward", "distill.privileged_prompt=Hint.", f"distill.server.urls=[{url}]", "rollouts.save=all")
    run = (f"run.dir={tmp_path / 'run'}", "run.steps=1", f"model.path={random_model}", "algo=distill")
    torchrun(1, TRAIN, *GAME_OVERRIDES, *SMALL, *given, *run)
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    rollouts = [each for each in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet") if each.is_trained_on]
    ids = renderer.tokenizer.encode("Hint.")
    for sequence in (sequence for rollout in rollouts for sequence in rollout.sequences):
        end = max(place for place in range(sequence.loss_mask.index(1)) if sequence.token_ids[place] == renderer.end_id)
        places = [place for place, mask in enumerate(sequence.loss_mask) if mask]
        read = replace(with_patches(sequence, renderer), token_ids=[*sequence.token_ids[:end], *ids, *sequence.token_ids[end:]])
        expected = [0.0, *hf_logprobs(teacher, read, renderer)]
        found = [sequence.teacher_logprobs[place] for place in places]
        assert found == pytest.approx([expected[place + len(ids)] for place in places], abs=1e-4)
    assert len(rollouts) == 4


def make_prompt(renderer: Renderer, template: str) -> PrivilegedPrompt:
    return build_privileged_prompt(DistillSettings(privileged_prompt=template), renderer)


def test_a_server_reads_the_privileged_prompt(url: str, teacher: Path) -> None:
    """With two pictures and two turns, logprobs and top tokens of the sampled tokens equal those of
    Hugging Face's model after the prompt with the answer, within 1e-4. A special token in the
    answer is ordinary text, and a rollout without an answer has its plain prompt."""
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    prompt = make_prompt(renderer, "The answer is {answer}.")
    clients = TeacherClients(
        TeacherServerSettings(urls=[url]), image_token_id=renderer.image_token_id, top_k=5, extend=prompt.extend_sequence
    )
    rollouts = [Rollout("t", "0", 0, 0, answer=answer, sequences=[make_sequence(renderer)]) for answer in ("<|im_end|> 7", "")]

    async def use() -> None:
        await clients.start(renderer.tokenizer.encode)
        for rollout in rollouts:
            await clients.add_logprobs(rollout)
        await clients.close()

    asyncio.run(use())
    model, logprobs = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32), []
    for rollout, text in zip(rollouts, ("The answer is <|im_end|> 7.", ""), strict=True):
        (sequence,), read = rollout.sequences, make_sequence(renderer)
        ids = renderer.tokenizer.encode(text, split_special_tokens=True) if text else []
        end = max(place for place in range(sequence.loss_mask.index(1)) if sequence.token_ids[place] == renderer.end_id)
        read.token_ids[end:end] = ids
        with torch.no_grad():
            logp = verify.compute_logits(model, read, image_token_id=renderer.image_token_id).log_softmax(-1)
        places = [place for place, mask in enumerate(sequence.loss_mask) if mask]
        assert len(places) == 4 and sequence.token_ids == make_sequence(renderer).token_ids
        expected = [logp[place + len(ids) - 1, sequence.token_ids[place]].item() for place in places]
        logprobs.append([sequence.teacher_logprobs[place] for place in places])
        assert logprobs[-1] == pytest.approx(expected, abs=1e-4)
        assert not any(sequence.teacher_logprobs[place] for place, mask in enumerate(sequence.loss_mask) if not mask)
        assert sequence.teacher_top is not None
        best = logp[[place + len(ids) - 1 for place in places]].topk(5)
        assert [*sequence.teacher_top.token_ids] == best.indices.flatten().tolist()
        assert [*sequence.teacher_top.logprobs] == pytest.approx(best.values.flatten().tolist(), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(*logprobs, strict=True)) > 1e-2, "the prompt changes the teacher"


def test_scores_are_those_of_the_sampled_tokens_after_the_inserted_text(teacher: Path) -> None:
    """A server that returns -(i + 1) / 1000 for the token at position i: with n inserted ids, the
    sampled token at position t has -(t + n + 1) / 1000. The request has the text's ids in place and
    one placeholder for each of two pictures."""
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    prompt, asked = make_prompt(renderer, "Look at {answer}."), []
    sequence = make_sequence(renderer)
    first_text = renderer.tokenizer.encode("Look at 12.", split_special_tokens=True)
    counts = [image.num_tokens for image in sequence.images]

    def answer(path: str, body: dict) -> tuple[int, object]:
        asked.append(body)
        numbers = iter(counts)
        ids = [each for token in body["token_ids"] for each in [token] * (next(numbers) if token == renderer.image_token_id else 1)]
        return 200, {"prompt_token_ids": ids, "prompt_logprobs": [{token: {"logprob": -(i + 1) / 1000}} for i, token in enumerate(ids)]}

    server = start_server(answer)
    rollout = Rollout("t", "0", 0, 0, answer="12", sequences=[sequence, make_sequence(renderer)])
    rollout.sequences[1].loss_mask[-1] = 0

    async def use() -> None:
        client = TeacherClient(TeacherServerSettings(urls=[server_url(server)]), image_token_id=renderer.image_token_id)
        client._pool.start()
        client._http = BoundedClient(token="")
        await client.add_logprobs(rollout.sequences, partial(prompt.extend_sequence, rollout=rollout))
        await client.close()

    try:
        asyncio.run(use())
    finally:
        stop_server(server)
    for each in rollout.sequences:
        expected = [-(t + len(first_text) + 1) / 1000 if mask else 0.0 for t, mask in enumerate(each.loss_mask)]
        assert each.teacher_logprobs == pytest.approx(expected, abs=1e-12)
    assert sequence.token_ids == make_sequence(renderer).token_ids and len(asked) == 2
    end = max(place for place in range(sequence.loss_mask.index(1)) if sequence.token_ids[place] == renderer.end_id)
    read = [*sequence.token_ids[:end], *first_text, *sequence.token_ids[end:]]
    runs = ([token] if token == renderer.image_token_id else [*each] for token, each in groupby(read))
    sent = [token for run in runs for token in run]
    assert sent.count(renderer.image_token_id) == len(counts) == 2
    assert all(body["token_ids"] == sent and len(body["content_parts"]) == 2 for body in asked)


def test_a_run_compares_top_tokens(torchrun, url: str, teacher: Path, random_model: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """The loss is the mean over sampled tokens of KL(teacher || policy) over the teacher's five most
    probable tokens and all others together, by Hugging Face's models. Ids that the policy never
    samples belong to the others."""
    given = (f"distill.server.urls=[{url}]", "distill.support=top_k", "distill.top_k=5", "distill.divergence=forward_kl", "algo=distill")
    run = (f"run.dir={tmp_path / 'run'}", "run.steps=2", "rollouts.save=all")
    torchrun(2, TRAIN, f"model.path={random_model}", *GAME_OVERRIDES, *SMALL, *given, *run)
    renderer = Renderer(ModelSettings(path=str(teacher), **PIXELS))
    models = [AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32) for folder in (random_model, teacher)]
    found: list[float] = []
    for rollout in read_rollouts(tmp_path / "run" / "rollouts" / "step_000000.parquet"):
        for sequence in rollout.sequences if rollout.is_trained_on else []:
            with_patches(sequence, renderer)
            with torch.no_grad():
                logits = [verify.compute_logits(model, sequence, image_token_id=renderer.image_token_id).double() for model in models]
            logits[0][:, renderer.banned_ids] = float("-inf")
            p_TV, q_TV = (x.softmax(-1) for x in logits)
            for place in (place for place, mask in enumerate(sequence.loss_mask) if mask):
                ids = [token for token in q_TV[place - 1].topk(5).indices.tolist() if token not in renderer.banned_ids]
                p, q = (torch.cat([x[place - 1, ids], 1 - x[place - 1, ids].sum(0, keepdim=True)]) for x in (p_TV, q_TV))
                found.append((q * (q / p).log()).sum().item())
    first, second, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["distill/divergence"] == first["loss"] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert second["distill/divergence"] < first["distill/divergence"]


IDS = [5, 6, 7]
GOOD = {"prompt_token_ids": IDS, "prompt_logprobs": [None, {"6": {"logprob": -0.5}, "9": {"logprob": -0.1}}, {"7": {"logprob": -2.0}}]}


@pytest.mark.parametrize(
    ("change", "error", "remedy"),
    [
        ({"prompt_logprobs": None}, RequestRejected, "the server returns no prompt logprobs; use a vLLM server"),
        (
            {"prompt_token_ids": [5, 6, 6, 7]},
            RequestRejected,
            "received 4 tokens, but 3 were sent: it expands images",
        ),
        ({"prompt_logprobs": [None, {"6": {"logprob": -0.5}}]}, InvalidReply, "returned 2 logprobs for 3 tokens"),
        ({"prompt_logprobs": [None, {"9": {"logprob": -0.1}}, {"7": {"logprob": -2.0}}]}, InvalidReply, "the logprob nan for token 6"),
        ({"prompt_logprobs": [None, {"6": {"logprob": 0.1}}, {"7": {"logprob": -2.0}}]}, InvalidReply, "the logprob 0.1 for token 6"),
        (
            {"prompt_logprobs": [None, {"6": {"logprob": -9999.0}}, {"7": {"logprob": -2.0}}]},
            InvalidReply,
            "logprob -9999.0 for token 6",
        ),
        ({"prompt_logprobs": [None, None, {"7": {"logprob": -2.0}}]}, InvalidReply, "the logprob nan for token 6"),
        ({"prompt_token_ids": "5"}, InvalidReply, "prompt_token_ids"),
    ],
)
def test_replies_that_cannot_be_used(change: dict, error: type[Exception], remedy: str) -> None:
    assert [score.logprob for score in parse_scores(json.dumps(GOOD).encode(), IDS)] == [0.0, -0.5, -2.0]
    top = parse_scores(json.dumps(GOOD).encode(), IDS, top_k=1)
    assert [score.top for score in top] == [(), [(9, -0.1)], [(7, -2.0)]]
    with pytest.raises(error, match=remedy):
        parse_scores(json.dumps({**GOOD, **change}).encode(), IDS)
    with pytest.raises(InvalidReply):
        parse_scores(json.dumps(GOOD).encode()[:-9], IDS)


async def start_and_close(client: TeacherClient) -> None:
    try:
        await client.start(lambda text: list(text.encode()))
    finally:
        await client.close()


def test_another_tokenizer_is_refused_at_the_start(url: str, teacher: Path) -> None:
    """A tokenizer in which the digit 3 has another id is refused, with the position and both
    ids."""
    renderer = Renderer(ModelSettings(path=str(teacher)))
    own, other = renderer.tokenizer.encode("3")[0], renderer.tokenizer.encode("4")[0]

    def encode(text: str) -> list[int]:
        return [other if token == own else token for token in renderer.tokenizer.encode(text)]

    client = TeacherClient(TeacherServerSettings(urls=[url]), image_token_id=renderer.image_token_id)
    with pytest.raises(
        PermanentInfraError, match=rf"tokenizer differs .* token \d+ of a text has the ids \[{own}\] there and \[{other}\] here"
    ):
        asyncio.run(client.start(encode))
    asyncio.run(TeacherClient(TeacherServerSettings(urls=[url]), image_token_id=3).close())


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, AccessDenied, "requires a valid token; set distill.server.token_file=FILE"),
        (404, PermanentInfraError, "HTTP 404: .*; start it with vllm serve MODEL --enable-scale-out"),
        (400, PermanentInfraError, "HTTP 400: .*too long"),
        (500, InfraError, "HTTP 500"),
    ],
)
def test_servers_that_refuse(status: int, kind: type[Exception], said: str) -> None:
    """A wrong token and a wrong request are not sent again; a failure of the server is."""
    asked: list[str] = []

    def answer(path: str, body: dict) -> tuple[int, object]:
        asked.append(path)
        return status, {"error": "too long"}

    server = start_server(answer)
    settings = TeacherServerSettings(urls=[server_url(server)], max_attempts=2, outage_timeout_s=2.0)
    try:
        with pytest.raises(kind, match=said) as raised:
            asyncio.run(start_and_close(TeacherClient(settings, image_token_id=3)))
    finally:
        stop_server(server)
    assert type(raised.value) is kind and len(asked) == (2 if status == 500 else 1)
