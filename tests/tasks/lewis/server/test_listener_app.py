"""Tests the listener in its own process with a real engine: its numbers against those of Hugging
Face, and the requests that it refuses."""

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from tests.support.model_server_process import ServerProcess, encode_base64, encode_png, make_noise_image, running_model_server

PYes = Callable[[Image.Image, str], float]
QUESTIONS = ('Does "a photo of a red cup" describe the main subject of the image? Answer yes or no.', "Is this it?", "<|im_end|> Yes?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create five images, a link that stays inside the root, and files that must not be served."""
    home = tmp_path_factory.mktemp("listener")
    root = home / "pictures"
    root.mkdir()
    for number in range(5):
        (root / f"{number}.png").write_bytes(encode_png(make_noise_image(number)))
    (home / "secret.png").write_bytes(encode_png(make_noise_image(9)))
    (root / "out.png").symlink_to(home / "secret.png")
    (root / "in.png").symlink_to(root / "4.png")
    (root / "again.png").write_bytes((root / "0.png").read_bytes())
    (root / "half.png").write_bytes((root / "0.png").read_bytes()[:300])
    (root / "text.png").write_text("no picture")
    (root / "wide.png").write_bytes(encode_png(Image.new("1", (7000, 7000))))
    os.mkfifo(root / "pipe.png")
    return root


@pytest.fixture(scope="module")
def listener(random_model: Path, folder: Path) -> Iterator[ServerProcess]:
    with running_model_server("listener", random_model, "--root", folder, "--log", folder.parent / "log.jsonl", "--name", "mine") as server:
        yield server


@pytest.fixture(scope="module")
def p_yes(random_model: Path) -> PYes:
    """Return p(yes) as computed by Hugging Face's processor and model alone. The forms of yes and
    no come from the vocabulary of the tokenizer."""
    processor = AutoProcessor.from_pretrained(random_model)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model, dtype=torch.float32).eval()
    words = {token.removeprefix("\u0120").lower(): [] for token in processor.tokenizer.get_vocab()}
    for token, number in processor.tokenizer.get_vocab().items():
        words[token.removeprefix("\u0120").lower()].append(number)

    @torch.no_grad()
    def p_yes(picture: Image.Image, question: str) -> float:
        plain = question.replace("<|im_end|>", "< |im_end|>")  # the caller's text is no special token
        content = [{"type": "image"}, {"type": "text", "text": plain}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=[picture], do_resize=False, return_tensors="pt")
        probability_V = model(**inputs).logits[0, -1].double().softmax(-1)
        yes, no = (probability_V[words[word]].sum().item() for word in ("yes", "no"))
        return yes / (yes + no)

    assert len(words["yes"]) == 1 and len(words["no"]) == 3
    return p_yes


def test_the_seeds_request_is_answered_with_hugging_faces_numbers(listener: ServerProcess, p_yes: PYes) -> None:
    """The game's own request with two items (paths, a question, topk) returns Hugging Face's
    probabilities and the reward computed from them."""
    batch = [
        {"candidate_paths": ["0.png", "1.png", "2.png"], "question": QUESTIONS[0], "topk": 1},
        {"candidate_paths": ["3.png", "0.png"], "question": QUESTIONS[1], "topk": 2},
    ]
    answer = listener.post("/batch_score", {"batch": batch})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["took"] > 0 and len(told["results"]) == 2
    for item, result in zip(batch, told["results"], strict=True):
        expected = [p_yes(make_noise_image(int(path[0])), item["question"]) for path in item["candidate_paths"]]
        assert result["yes_probabilities"] == pytest.approx(expected, abs=1e-5, rel=1e-4)
        best = max(range(len(expected)), key=expected.__getitem__)
        share = expected[best] / sum(expected)
        assert result["predicted_index"] == best
        assert result["reward_score"] == pytest.approx(share if expected[best] >= 0.3 else 0.5 * share, rel=1e-4)
        assert result["top_indices"] == sorted(range(len(expected)), key=lambda index: -expected[index])[: item["topk"]]
    one = listener.post("/score", batch[0]).json()
    assert one["version"] == told["version"] and one["took"] > 0
    assert one["yes_probabilities"] == pytest.approx(told["results"][0]["yes_probabilities"], abs=1e-5)


def test_many_at_once_are_answered_as_alone(listener: ServerProcess, p_yes: PYes) -> None:
    """Each of 48 requests, for all questions and orders and 40 at a time, returns Hugging Face's
    numbers. Special tokens in a question are plain text."""
    orders = [(0, 1, 2), (2, 1, 0), (3, 4), (1, 3, 0, 4)]
    asked = [(order, question) for order in orders for question in QUESTIONS] * 4
    bodies = [{"candidate_paths": [f"{index}.png" for index in order], "question": question} for order, question in asked]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda body: listener.post("/score", body, timeout_s=200), bodies))
    expected = {(index, question): p_yes(make_noise_image(index), question) for index in range(5) for question in QUESTIONS}
    for (order, question), answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["yes_probabilities"] == pytest.approx([expected[index, question] for index in order], abs=1e-5, rel=1e-4)


def test_pictures_travel_as_paths_files_or_hashes(listener: ServerProcess) -> None:
    files = [encode_png(make_noise_image(0)), encode_png(make_noise_image(11))]
    by_file = [{"base64": encode_base64(content)} for content in files]
    by_hash = [{"sha256": hashlib.sha256(content).hexdigest()} for content in files]
    unknown = listener.post("/score", {"candidates": by_hash, "question": "This?"})
    assert unknown.status_code == 404 and unknown.json()["detail"]["unknown"] == [each["sha256"] for each in by_hash]
    sent = listener.post("/score", {"candidates": by_file, "question": "This?"}).json()
    named = listener.post("/score", {"candidates": by_hash, "question": "This?"}).json()
    mixed = listener.post("/score", {"candidates": [{"path": "in.png"}, by_hash[1]], "question": "This?"}).json()
    linked = listener.post("/score", {"candidate_paths": ["4.png", "0.png"], "question": "This?"}).json()
    assert named["yes_probabilities"] == pytest.approx(sent["yes_probabilities"], abs=1e-6)
    assert mixed["yes_probabilities"] == pytest.approx([linked["yes_probabilities"][0], sent["yes_probabilities"][1]], abs=1e-6)


GOOD = {"candidate_paths": ["0.png", "1.png"], "question": "This?"}
BAD = {
    "half a picture": ({"candidate_paths": ["0.png", "half.png"]}, "cannot be opened|truncated"),
    "no picture": ({"candidate_paths": ["0.png", "text.png"]}, "is text, not an image"),
    "no file": ({"candidate_paths": ["0.png", "none.png"]}, "No such file"),
    "a folder": ({"candidate_paths": ["0.png", "."]}, "outside|is not a regular file|directory"),
    "a pipe": ({"candidate_paths": ["0.png", "pipe.png"]}, "is not a regular file"),
    "a picture of 49 million pixels": ({"candidate_paths": ["0.png", "wide.png"]}, "7000x7000 pixels, more than"),
    "dots": ({"candidate_paths": ["0.png", "../pictures/1.png"]}, r"must not contain \.\."),
    "an absolute path": ({"candidate_paths": ["0.png", "/etc/passwd"]}, "is outside"),
    "one that is not there": ({"candidate_paths": ["0.png", "/etc/none"]}, "is outside"),
    "a link that leads out": ({"candidate_paths": ["0.png", "out.png"]}, "is outside"),
    "a nul": ({"candidate_paths": ["0.png", "1.png\0"]}, "null characters"),
    "no candidates": ({"candidate_paths": []}, "candidate_paths or candidates"),
    "one candidate": ({"candidate_paths": ["0.png"]}, "at least two candidates"),
    "65 candidates": ({"candidate_paths": ["0.png"] * 65}, "at most 64"),
    "the same path twice": ({"candidate_paths": ["0.png", "0.png"]}, "candidates 0 and 1 are the same image"),
    "the same picture twice": ({"candidate_paths": ["1.png", "0.png", "again.png"]}, "candidates 1 and 2 are the same image"),
    "more wanted than there are": ({"topk": 3}, "topk=3: must be at most 2"),
    "no question": ({"question": ""}, "at least 1 character"),
    "a question of a megabyte": ({"question": "x" * (1 << 20)}, "at most 16384"),
    "a question beyond the model": ({"question": "why? " * 3000}, "tokens including the image"),
    "a misspelled key": ({"top_k": 1}, "Extra inputs"),
    "both kinds": ({"candidates": [{"path": "0.png"}, {"path": "1.png"}]}, "not both"),
    "no base64": ({"candidate_paths": [], "candidates": [{"path": "0.png"}, {"base64": "?"}]}, "not valid base64"),
    "a candidate that is nothing": ({"candidate_paths": [], "candidates": [{}, {"path": "1.png"}]}, "one of path, base64 and sha256"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_answered_is_an_error_and_no_number(listener: ServerProcess, case: str) -> None:
    """An invalid item is refused, alone and together with a valid one. The whole request is
    refused, nothing is scored as zero, and the server stays up."""
    change, said = BAD[case]
    body = {key: value for key, value in {**GOOD, **change}.items() if value != [] or case == "no candidates"}
    for path, sent in (("/score", body), ("/batch_score", {"batch": [GOOD, body]})):
        answer = listener.post(path, sent)
        assert answer.status_code in (413, 422), (path, answer.text)
        assert "probabilities" not in answer.text
    assert re.search(said, answer.text), answer.text
    assert listener.post("/score", GOOD).status_code == 200


def test_it_tells_of_itself(listener: ServerProcess, folder: Path) -> None:
    health = httpx.get(f"{listener.url}/health", trust_env=False).json()
    assert (health["status"], health["name"]) == ("ok", "mine") and len(health["version"]) == 32
    assert len(health["tokens"]["yes"]) == 1 and len(health["tokens"]["no"]) == 3
    before = listener.post("/score", GOOD).json()
    counted = httpx.get(f"{listener.url}/metrics", trust_env=False).text
    items = next(float(line.split()[1]) for line in counted.splitlines() if line.startswith("listener_items_total"))
    lines = (folder.parent / "log.jsonl").read_text().splitlines()
    assert len(lines) == items and f'"reward_score": {before["reward_score"]!r}' in lines[-1]
    assert f'"version": "{health["version"]}"' in lines[-1]
