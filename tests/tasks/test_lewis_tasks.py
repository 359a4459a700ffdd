"""Tests the two tasks of the Lewis game on rounds from the builder: prompts, rewards and refusals,
with a listener over real HTTP."""

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.config import DataSettings, ListenerSettings, TaskSettings
from megatron_rl.config.task_options import LewisListenerOptions, LewisSpeakerOptions
from megatron_rl.errors import InfraError
from megatron_rl.registry import build_task
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.lewis.description import parse_description
from megatron_rl.tasks.lewis.listener_client import ListenerClient
from megatron_rl.types import Turn
from megatron_rl_tools.data.make_lewis import main
from tests.support.fake_listener import FakeEngineHolder, yes_probability
from tests.support.listener_clients import serve_listener
from tests.support.model_server_process import encode_png, make_noise_image
from tests.support.rollout_factory import make_reward_input

REPLY = "<thinking>x</thinking><coarse>a photo of a red mug</coarse><detailed>The mug is red.</detailed>"
QUESTION = 'Does this description, "a photo of a red mug The mug is red.", describe the main subject of the image? Answer yes or no.'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create images of two categories of four concepts in three views, and the rounds made of
    them."""
    home = tmp_path_factory.mktemp("lewis")
    for number in range(24):
        folder = home / "pictures" / f"kind{number // 12}" / f"thing{number // 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 3}.png").write_bytes(encode_png(make_noise_image(number, side=28)))
    assert main(["--pictures", str(home / "pictures"), "--out", str(home / "rounds"), "--queries", "2", "--train-share", "0.5"]) == 0
    return home / "pictures", home / "rounds"


def task_of(name: str, built: tuple[Path, Path], *urls: str, options: object = None, train: list[str] | None = None) -> Task:
    pictures, rounds = built
    kind = name.removeprefix("lewis_")
    data = DataSettings(train=train or [f"{rounds}/{kind}:train"], eval=[f"{rounds}/{kind}:test"], images=str(pictures), max_eval=3)
    listener = ListenerSettings(urls=list(urls), backoff_s=0.01, max_attempts=2)
    return build_task(TaskSettings(name=name, data=data, options=options, listener=listener))


def parts_of(task: Task, example: object) -> list[object]:
    async def shown() -> list[object]:
        (message,) = await task.env(example).reset(0)
        return [part["text"] if part["type"] == "text" else part["image"] for part in message["content"]]

    return asyncio.run(shown())


def scores(task: Task, replies: list[tuple[object, str]]) -> list[object]:
    async def score() -> list[object]:
        await task.start()
        try:
            turns = [(example, Turn(sequence=0, token_span=(0, 1), text=text)) for example, text in replies]
            outcomes = [make_reward_input(turn, payload=example.payload) for example, turn in turns]
            for (example, _), outcome in zip(turns, outcomes, strict=True):
                outcome.rollout.example_id = example.id
            return await asyncio.gather(*map(task.rubric.score, outcomes), return_exceptions=True)
        finally:
            await task.close()

    return asyncio.run(score())


def test_a_speaker_is_paid_by_the_listener_that_sees_the_candidates(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The reward comes from a listener over real HTTP. The expected pick is computed from the
    listener's known numbers and the images that the round names."""
    log = tmp_path / "deep" / "log.jsonl"
    with serve_listener(FakeEngineHolder()) as url:
        task = task_of("lewis_speaker", built, url, options=LewisSpeakerOptions(accuracy="binary", log=str(log)))
        examples = task.examples("train")
        assert len(examples) == 8 and len(task.examples("eval")) == 3 and task.stop == ("</detailed>",)
        picture, question = parts_of(task, examples[0])[0], parts_of(task, examples[0])[-1]
        assert isinstance(picture, Image.Image) and question.strip().startswith("Describe the kind0 in this picture")
        given = scores(task, [(example, REPLY) for example in examples])
    for example, score in zip(examples, given, strict=True):
        paths = [Path(image.source) for image in example.payload["candidates"]]
        ps = [yes_probability(Image.open(path), QUESTION) for path in paths]
        is_right = ps.index(max(ps)) == example.payload["target"]
        query = example.payload["images"][0].source
        target = paths[example.payload["target"]]
        assert target.read_bytes() != query and target.parent.name not in {path.parent.name for path in paths if path != target}
        assert (score.reward_terms["picked"], score.reward) == (float(is_right), float(is_right) + 1.0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 8 and {line["reward"] for line in lines} <= {0.0, 1.0}
    assert lines[0].keys() == {"time", "reward", "content", "solution"}
    assert 0 < sum(score.reward_terms["picked"] for score in given) < 8


LONG = "The mug is red, " + "with a chip and " * 6 + "small."
SPOKEN = f"<thinking>x</thinking><coarse>a photo of a red mug</coarse><detailed>{LONG}</detailed>"
VARIANTS = {
    "readme": {SPOKEN: (1.0, 0.1), SPOKEN.replace("</thinking>", ""): (0.0, 0.1), REPLY.replace(".<", ". Big.<"): (1.0, 0.0)},
    "code": {SPOKEN: (1.0, 0.0), SPOKEN.replace("</thinking>", ""): (0.66, 0.0), REPLY.replace(".<", ". Big.<"): (1.0, -0.2)},
}
"""Hand-computed format and length rewards of a response with one sentence of 29 words, of one
without a closing tag, and of one with two short sentences. The coarse phrase has six words."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_means_each_reward_of_its_account(built: tuple[Path, Path], variant: str) -> None:
    """Each variant uses its own rewards (docs/lewis.md): the README pays 1 for the right pick, the
    code pays its reward_score, which is computed here from the listener's known numbers."""
    with serve_listener(FakeEngineHolder()) as url:
        options = LewisSpeakerOptions(parts=["accuracy", "format", "length"], variant=variant)
        task = task_of("lewis_speaker", built, url, options=options)
        asked = [(example, text) for example in task.examples("train") for text in VARIANTS[variant]]
        given = scores(task, asked)
    for (example, text), score in zip(asked, given, strict=True):
        question = parse_description(text, category="mug").question
        ps = [yes_probability(image.open(), question) for image in example.payload["candidates"]]
        is_right = ps.index(max(ps)) == example.payload["target"]
        pays = 1.0 if variant == "readme" else max(ps) / sum(ps) * (1.0 if max(ps) >= 0.3 else 0.5)
        assert score.reward_terms["accuracy"] == pytest.approx(pays if is_right else 0.0)
        assert (score.reward_terms["format"], score.reward_terms["length"]) == pytest.approx(VARIANTS[variant][text])
    right = {score.reward_terms["accuracy"] for score in given if score.reward_terms["picked"]}
    assert right == {1.0} if variant == "readme" else len(right) > 3


@pytest.mark.parametrize(("variant", "false_yes"), [("readme", -0.7), ("code", -1.0)])
def test_a_variant_of_the_listener_means_its_punishment(built: tuple[Path, Path], variant: str, false_yes: float) -> None:
    """A wrong yes costs 0.7 in the README's variant and 1 in the code's."""
    task = task_of("lewis_listener", built, options=LewisListenerOptions(reward="weighted", variant=variant))
    wrong = next(example for example in task.examples("train") if example.payload["answer"] == "no")
    (score,) = scores(task, [(wrong, task.gold_replies(wrong)[0].replace('"no"', '"yes"'))])
    assert score.reward_terms == {"weighted": false_yes, "format": 1.0}


def test_overlap_is_asked_for_and_paid(built: tuple[Path, Path]) -> None:
    """With the overlap reward, the prompt requests state and location once, and the stop string
    follows them. The sentence of the response shares "red mug", "mug wooden" and "wooden table" of
    its 4 pairs with the 3 of state and location: -2 * 3 / 7."""
    reply = f"{REPLY[: REPLY.index('<detailed>')]}<detailed>The old red mug is on a wooden table.</detailed>"
    state = "<state>a red mug</state><location>on a wooden table</location>"
    with serve_listener(FakeEngineHolder()) as url:
        plain = task_of("lewis_speaker", built, url)
        task = task_of("lewis_speaker", built, url, options=LewisSpeakerOptions(parts=["accuracy", "format", "overlap"]))
        example = task.examples("train")[0]
        prompt, without = parts_of(task, example)[-1], parts_of(plain, plain.examples("train")[0])[-1]
        assert prompt.startswith(without) and all(f"<{tag}>" in prompt and f"<{tag}>" not in without for tag in ("state", "location"))
        assert task.stop == ("</location>",) and reply + state == (reply + state).split(task.stop[0])[0] + task.stop[0]
        said, silent = scores(task, [(example, reply + state), (example, reply)])
    assert said.reward_terms["overlap"] == pytest.approx(-6 / 7) and silent.reward_terms["overlap"] == 0.0
    assert said.reward_terms["picked"] == silent.reward_terms["picked"] and said.reward == pytest.approx(silent.reward - 6 / 7)


def test_each_word_has_a_cost(built: tuple[Path, Path]) -> None:
    """The four words of the coarse part and the six of the detailed part cost 0.02 each. Thoughts
    cost nothing."""
    reply = "<thinking>one two three</thinking><coarse>a red wooden mug</coarse><detailed>It has a scratch below rim.</detailed>"
    with serve_listener(FakeEngineHolder()) as url:
        free, costly = (task_of("lewis_speaker", built, url, options=LewisSpeakerOptions(word_cost=cost)) for cost in (0.0, 0.02))
        example = free.examples("train")[0]
        (without,), (paid,) = scores(free, [(example, reply)]), scores(costly, [(example, reply)])
    assert without.reward_terms == paid.reward_terms and paid.reward_terms["words"] == 10
    assert without.reward - paid.reward == pytest.approx(0.2)
    with pytest.raises(ValueError, match="^task.options.word_cost=-1.0: "):
        LewisSpeakerOptions(word_cost=-1.0)


def test_a_row_that_asks_for_state_itself_is_not_asked_twice(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The overlap reward does not extend a prompt that already requests state and location."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, "speaker_problem": "Say <state> and <location>."}) + "\n")
    options = LewisSpeakerOptions(parts=["accuracy", "overlap"])
    task = task_of("lewis_speaker", built, "http://127.0.0.1:9", options=options, train=[str(file)])
    assert parts_of(task, task.examples("train")[0])[-1].strip() == "Say <state> and <location>."


def test_a_listener_that_is_gone_is_no_score(built: tuple[Path, Path]) -> None:
    """A listener without numbers leads to an InfraError after all attempts, and to no score."""
    room = FakeEngineHolder(logprobs_fn=lambda p: [float("nan")] * 3)
    with serve_listener(room) as url:
        task = task_of("lewis_speaker", built, url)
        (fault,) = scores(task, [(task.examples("train")[0], REPLY)])
    assert isinstance(fault, InfraError) and "listener: failed after 2 of 2 attempts" in str(fault)


def test_a_witness_is_told_its_own_token_and_errors_name_it(
    built: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The run's listener and each held-out listener get their own token, or none. If a held-out
    listener is down or its token is unknown, the error names it as a held-out listener."""
    words = {name: tmp_path / name for name in ("listener", "frozen")}
    for name, file in words.items():
        file.write_text(f"{name * 8}\n")
        file.chmod(0o600)
    heard: dict[str, set[str]] = {}

    class Told(ListenerClient):
        async def start(self) -> None:
            await super().start()
            heard[self.settings.urls[0]] = {self._http.headers.get("authorization", "")}

    rooms = {name: FakeEngineHolder() for name in ("listener", "frozen", "open")}
    with (
        serve_listener(rooms["listener"], token="listener" * 8) as url, serve_listener(rooms["frozen"], token="frozen" * 8) as frozen,
        serve_listener(rooms["open"]) as stranger,
    ):  # fmt: skip
        witnesses = {"frozen": frozen, "stranger": stranger}
        data = DataSettings(train=[f"{built[1]}/speaker:train"], eval=[f"{built[1]}/speaker:test"], images=str(built[0]), max_eval=3)
        listener = ListenerSettings(urls=[url], token_file=str(words["listener"]), backoff_s=0.01, max_attempts=2)

        def task_with(**options: object) -> Task:
            task = build_task(TaskSettings(name="lewis_speaker", data=data, options=LewisSpeakerOptions(**options), listener=listener))
            for client in (task.listener, *task.held_out_listeners.values()):
                client.__class__ = Told
            return task

        task = task_with(held_out_listeners=witnesses, held_out_token_files={"frozen": str(words["frozen"])})
        (score,) = scores(task, [(task.examples("eval")[0], REPLY)])
        assert {"picked", "frozen", "stranger"} <= score.reward_terms.keys() and all(room.requests for room in rooms.values())
        assert heard == {url: {f"Bearer {'listener' * 8}"}, frozen: {f"Bearer {'frozen' * 8}"}, stranger: {""}}
        unknown = task_with(held_out_listeners=witnesses)
        with pytest.raises(
            InfraError, match=rf"^task.options.held_out_listeners.frozen=\['{frozen}'\].*task.options.held_out_token_files.frozen=FILE"
        ):
            scores(unknown, [])
        with pytest.raises(InfraError, match=r"^task.options.held_out_listeners.gone=\['http://127.0.0.1:9'\]: no listener is available"):
            scores(task_with(held_out_listeners={"gone": "http://127.0.0.1:9"}), [])
        with pytest.raises(ValueError, match=r"^task.options.held_out_token_files.frozen="):
            task_with(held_out_listeners=witnesses, held_out_token_files={"frozen": str(tmp_path / "none")})
    with pytest.raises(ValueError, match=r"^task.options.held_out_token_files=other: is not a held-out listener"):
        LewisSpeakerOptions(held_out_listeners={"frozen": "http://a:1"}, held_out_token_files={"other": "x"})


def test_a_listener_in_training_compares_or_selects(built: tuple[Path, Path]) -> None:
    """Gold responses earn full marks, and their opposites do not. Half of the comparisons have the
    answer yes."""
    task = task_of("lewis_listener", built, options=LewisListenerOptions(reward="weighted"))
    examples = task.examples("train")
    assert sorted(example.payload["answer"] for example in examples) == ["no"] * 4 + ["yes"] * 4
    parts = parts_of(task, examples[0])
    assert [isinstance(part, Image.Image) for part in parts] == [False, True, False, True, False] and "Image 2" in parts[2]
    gold = scores(task, [(example, task.gold_replies(example)[0]) for example in examples])
    assert [score.reward for score in gold] == [2.0] * 8
    turned = [(each, task.gold_replies(each)[0].replace('"yes"', '"NO"').replace('"no"', '"yes"')) for each in examples]
    expected = [1.0 - 1.0 if each.payload["answer"] == "no" else 1.0 - 0.3 for each in examples]
    assert [score.reward for score in scores(task, turned)] == pytest.approx(expected)
    select = task_of("lewis_listener", built, options=LewisListenerOptions(reward="selection"), train=[f"{built[1]}/speaker:train"])
    rounds = select.examples("train")
    assert [len(example.payload["images"]) for example in rounds] == [4] * 8
    assert [score.reward for score in scores(select, [(each, select.gold_replies(each)[0]) for each in rounds])] == [2.0] * 8


ROW = {"image": "kind0/thing0/0.png", "ret_paths": ["kind0/thing0/1.png", "kind0/thing1/0.png"], "solution": "A", "category": "kind0"}
BAD = {
    "one candidate": ({"ret_paths": ["kind0/thing0/1.png"]}, "ret_paths: has 1 candidates; must have between 2 and 64"),
    "none": ({"ret_paths": []}, "ret_paths: has 0 candidates"),
    "65": ({"ret_paths": ["kind0/thing0/1.png"] * 65}, "ret_paths: has 65 candidates"),
    "twice the same": ({"ret_paths": ["kind0/thing0/1.png"] * 2}, "ret_paths: contains a candidate more than once"),
    "a letter of nobody": ({"solution": "C"}, "solution: 'C' is not one of the names A, B"),
    "two names for three": ({"names": ["A", "B", "C"]}, "names: must contain 2 different names"),
    "words with a place": ({"speaker_problem": "What is <image>?"}, "speaker_problem: contains <image>"),
    "no picture": ({"image": None}, "image: is missing"),
    "a path that leads out": ({"ret_paths": ["../secret.png", "kind0/thing1/0.png"]}, "is outside of"),
    "no such file": ({"ret_paths": ["kind0/none.png", "kind0/thing1/0.png"]}, "no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_no_round_is_named(built: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    """An invalid row is an error with the file, the row and the reason."""
    change, said = BAD[case]
    (built[0].parent / "secret.png").write_bytes(encode_png(make_noise_image(99, side=28)))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, **change}) + "\n")
    task = task_of("lewis_speaker", built, "http://127.0.0.1:9", train=[str(file)])
    with pytest.raises(ValueError, match="rows.jsonl row 1: ") as caught:
        task.examples("train")
    assert said in str(caught.value)


def test_settings_that_do_not_fit_are_refused(built: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"^task.listener.urls=\[\]: this reward requires a listener"):
        task_of("lewis_speaker", built)
    with pytest.raises(ValueError, match=r"^task.options.parts=.*variant=readme has no overlap reward"):
        LewisSpeakerOptions(parts=["accuracy", "overlap"], variant="readme")
    with pytest.raises(ValueError, match=r"^task.options.accuracy=soft_gated: variant=readme supports only binary accuracy"):
        LewisSpeakerOptions(accuracy="soft_gated", variant="readme")
    for wrong in ({"parts": []}, {"parts": ["accuracy", "accuracy"]}, {"parts": ["beauty"]}, {"accuracy": "soft"}, {"variant": "paper"}):
        with pytest.raises(ValueError, match=r"^task.options"):
            LewisSpeakerOptions(**wrong)
    with pytest.raises(ValueError, match=r"^task.options.reward=best"):
        LewisListenerOptions(reward="best")
