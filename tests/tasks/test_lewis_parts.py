"""Tests the demonstrations of the Lewis game, the held-out listeners and contact sheets, and that
the prompts of a run equal those of the services."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from megatron_rl.config import DataSettings, ListenerSettings, SpeakerSettings, TaskSettings
from megatron_rl.config.task_options import LewisListenerOptions, LewisSpeakerOptions
from megatron_rl.errors import PermanentInfraError
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.registry import build_task
from megatron_rl.tasks.lewis.colors import describe_by_color, find_dominant_colors, join_words, write_vague_description
from megatron_rl.tasks.lewis.demonstrations import make_demonstrations
from megatron_rl.tasks.lewis.description import PROMPT, parse_description
from megatron_rl.tasks.lewis.listener_protocol import make_listener_score
from megatron_rl.tasks.lewis.sheets import GREEN, RED, ContactSheets
from megatron_rl.types import Rollout, Turn
from megatron_rl_tools.data.make_lewis import main
from tests.rewards.test_speaker_client import speaking
from tests.support.fake_listener import FakeEngineHolder, yes_probability
from tests.support.listener_clients import serve_listener
from tests.support.model_server_process import encode_png, make_noise_image
from tests.support.rollout_factory import make_reward_input

REPLY = "<thinking>x</thinking><coarse>a photo of a red kind0</coarse><detailed>The kind0 is red.</detailed>"


def thing(*parts: tuple[str, int], background: str = "white", side: int = 60) -> Image.Image:
    """Return an image with columns of colors, each as wide as its number, before a background."""
    picture, left = Image.new("RGB", (side, side), background), 10
    for color, width in parts:
        ImageDraw.Draw(picture).rectangle((left, 10, left + width - 1, 40), fill=color)
        left += width
    return picture


def test_colors_are_named_by_how_much_there_is_of_them() -> None:
    """Colors are listed by area, on columns of known width. A color with a twentieth of the area is
    left out, the background does not count, and an empty image has the color of its background."""
    assert find_dominant_colors(thing(("#c8282d", 12), ("#3278d7", 20), ("#2d2d32", 6))) == ["blue", "red", "black"]
    assert find_dominant_colors(thing(("#c8282d", 19), ("#3278d7", 1))) == ["red"]
    assert find_dominant_colors(thing(("#5aa53c", 10), background="#c8282d")) == ["green"]
    assert find_dominant_colors(thing(background="#dcd6f0")) == ["white"]
    assert (join_words(["red"]), join_words(["red", "blue"]), join_words(["red", "blue", "white"])) == (
        "red",
        "red and blue",
        "red, blue and white",
    )


def test_what_is_told_is_read_as_it_is_meant() -> None:
    """The parser reads a demonstrated description as it was written. A vague description names no
    color."""
    said = parse_description(describe_by_color(thing(("#c8282d", 12), ("#3278d7", 20)), category="mug"), category="mug")
    assert (said.coarse, said.detailed) == ("a photo of a blue mug", "The mug is blue and red.")
    empty = parse_description(write_vague_description(category="mug"), category="mug")
    assert empty.question and not any(color in empty.question for color in ("red", "blue", "white", "black"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("parts")
    for number in range(24):
        folder = home / "pictures" / f"kind{number // 12}" / f"thing{number // 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 3}.png").write_bytes(encode_png(make_noise_image(number, side=28)))
    words = ["--queries", "2", "--train-share", "0.5", "--distractors", "random"]
    assert main(["--pictures", str(home / "pictures"), "--out", str(home / "rounds"), *words]) == 0
    return home / "pictures", home / "rounds"


def data_of(built: tuple[Path, Path]) -> DataSettings:
    pictures, rounds = built
    return DataSettings(train=[f"{rounds}/speaker:train"], eval=[f"{rounds}/speaker:test"], images=str(pictures))


def speaker_of(built: tuple[Path, Path], url: str = "http://127.0.0.1:9", **options: object):
    listener = ListenerSettings(urls=[url], backoff_s=0.01, max_attempts=2)
    settings = TaskSettings(name="lewis_speaker", data=data_of(built), options=LewisSpeakerOptions(**options), listener=listener)
    return build_task(settings)


def listener_task(built: tuple[Path, Path], *urls: str):
    speaker = SpeakerSettings(urls=list(urls), max_attempts=2)
    options = LewisListenerOptions(reward="heard")
    return build_task(TaskSettings(name="lewis_listener", data=data_of(built), options=options, speaker=speaker))


def shape(messages: list[dict]) -> list[tuple[str, object]]:
    """Return types and texts of the parts of the only message."""
    (message,) = messages
    return [(part["type"], part.get("text")) for part in message["content"]]


def test_a_run_prompts_as_the_services_do(built: tuple[Path, Path]) -> None:
    """A prompt is the image, directly followed by the text, as
    tasks/lewis/server/prompt_renderer.py renders it. A run thus trains on the prompts that the
    services use."""
    speaker = speaker_of(built)
    example = speaker.examples("train")[0]
    prompt = asyncio.run(speaker.env(example).reset(0))
    assert shape(prompt) == [("image", None), ("text", PROMPT.format(category="kind0"))]
    (shown,) = speaker.demonstrations("told", num=1, seed=0)[0].messages[:1]
    assert shape([shown])[0] == ("image", None) and shape([shown])[1][1].startswith("Describe the kind")
    listener = listener_task(built)
    question = asyncio.run(listener.env(listener.examples("train")[0]).reset(0))
    demonstrated = listener.demonstrations("heard", num=1, seed=0)[0].messages
    for asked in (question, demonstrated[:1]):
        ((kind, none), (words, text)) = shape(asked)
        assert (kind, none, words) == ("image", None, "text") and text.startswith('Does this description, "a photo of a ')


def test_a_listener_hears_of_a_target_and_of_another_in_turn(built: tuple[Path, Path]) -> None:
    """Half of the examples show the target of their round (yes), half another candidate (no). With
    a speaker, the question quotes its description of the query; if it describes nothing, the
    episode fails with an InfraError."""
    with speaking((200, {"text": REPLY})) as server:
        task = listener_task(built, server.url)
        rounds, examples = speaker_of(built).examples("train"), task.examples("train")
        assert [example.payload["answer"] for example in examples] == ["yes", "no"] * len(rounds)

        async def prompts() -> list[list[dict]]:
            await task.start()
            try:
                return [await task.env(example).reset(0) for example in examples[:4]]
            finally:
                await task.close()

        for number, (given, example) in enumerate(zip(rounds, examples[1::2], strict=True)):
            others = [each for place, each in enumerate(given.payload["candidates"]) if place != given.payload["target"]]
            assert len(others) > 1 and example.payload["images"][0].read() == others[number % len(others)].read()
        for messages, example, given in zip(asyncio.run(prompts()), examples, [rounds[0]] * 2 + [rounds[1]] * 2, strict=False):
            candidates, target = given.payload["candidates"], given.payload["target"]
            is_target = example.payload["images"][0].read() == candidates[target].read()
            assert is_target == (example.payload["answer"] == "yes")
            assert messages[0]["content"][0]["image"].tobytes() == example.payload["images"][0].open().tobytes()
            assert messages[0]["content"][1]["text"] == parse_description(REPLY, category="kind0").question
    with speaking((200, {"text": "hm"})) as server:
        task = listener_task(built, server.url)

        async def ask() -> None:
            await task.start()
            try:
                await task.env(task.examples("train")[0]).reset(0)
            finally:
                await task.close()

        with pytest.raises(PermanentInfraError, match=r"example train/0/yes .*the speaker's reply contains no description \('hm'\)"):
            asyncio.run(ask())


@pytest.mark.parametrize(("reply", "yes", "no"), [("yes", 1, 0), (" No\n", 0, 1), ("yes, it is", 0, 0), ("", 0, 0)])
def test_a_listener_is_paid_for_the_right_word_alone(built: tuple[Path, Path], reply: str, yes: float, no: float) -> None:
    task = listener_task(built)
    for example, worth in zip(task.examples("train")[:2], (yes, no), strict=True):
        outcome = make_reward_input(Turn(sequence=0, token_span=(0, 1), text=reply), payload=example.payload)
        assert asyncio.run(task.rubric.score(outcome)).reward == worth
        assert task.gold_replies(example) == [example.payload["answer"]]


def scored(task, examples: list, reply: str = REPLY) -> list[Rollout]:  # noqa: ANN001 (a task of the table)
    """Return the rollout of each example with this response, scored as the rollout manager does
    it."""

    async def score() -> list[Rollout]:
        await task.start()
        try:
            rollouts = []
            for group, example in enumerate(examples):
                outcome = make_reward_input(Turn(sequence=0, token_span=(0, 1), text=reply), payload=example.payload)
                rollout = outcome.rollout
                rollout.example_id, rollout.group, rollout.sample_index = example.id, group, 0
                rollout.reward_terms = (await task.rubric.score(outcome)).reward_terms
                rollouts.append(rollout)
            return rollouts
        finally:
            await task.close()

    return asyncio.run(score())


class Other(FakeEngineHolder):
    """Engine holder with the opposite answers."""

    def __init__(self) -> None:
        super().__init__(version="two", logprobs_fn=lambda p: FakeEngineHolder().logprobs_fn(1 - p))


def test_witnesses_hear_held_out_games_and_never_reward(built: tuple[Path, Path]) -> None:
    """Held-out listeners score evaluation games only and do not change the reward. Picks and drift
    of a frozen listener with opposite answers equal hand-computed ones."""
    frozen = Other()
    with serve_listener(FakeEngineHolder()) as url, serve_listener(frozen) as witness:
        task = speaker_of(built, url, accuracy="binary", held_out_listeners={"frozen": witness})
        trained = scored(task, task.examples("train")[:3])
        assert (
            all("frozen" not in rollout.reward_terms and rollout.reward_terms["words"] == 10 for rollout in trained) and not frozen.requests
        )
        held_out = scored(task, task.examples("eval"))
        figures = task.extra_metrics(task.examples("eval"), held_out)
    question = parse_description(REPLY, category="kind0").question
    picks = []
    for example, rollout in zip(task.examples("eval"), held_out, strict=True):
        ps = [yes_probability(image.open(), question) for image in example.payload["candidates"]]
        target = example.payload["target"]
        picks.append((float(ps.index(max(ps)) == target), float(ps.index(min(ps)) == target)))
        assert (rollout.reward_terms["picked"], rollout.reward_terms["frozen"], rollout.reward_terms["accuracy"]) == (
            *picks[-1],
            picks[-1][0],
        )
    shown = {image.read() for example in task.examples("eval") for image in example.payload["candidates"]}
    assert len({*frozen.requests}) == len(shown)
    assert figures["drift"] == pytest.approx(sum(partner - other for partner, other in picks) / len(picks)) and len({*picks}) > 1
    for wrong in ({"picked": "http://a:1"}, {"frozen": "a"}):
        with pytest.raises(ValueError, match=r"^task.options.held_out_listeners"):
            LewisSpeakerOptions(held_out_listeners=wrong)


def test_an_evaluation_leaves_one_sheet(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Each evaluation writes one contact sheet, of the greedy episodes, which come first. Its
    frames have the colors of the target and of a wrong pick."""
    with serve_listener(FakeEngineHolder()) as url:
        task = speaker_of(built, url, sheets=str(tmp_path / "sheets"))
        examples = task.examples("eval")
        for _ in range(2):
            greedy = scored(task, examples)
            task.extra_metrics(examples, greedy)
            task.extra_metrics(examples, scored(task, examples))
        task.extra_metrics(examples, scored(task, task.examples("train")))
    sheets = sorted((tmp_path / "sheets").iterdir())
    assert [sheet.name for sheet in sheets] == ["evaluation_0000.png", "evaluation_0001.png"]
    colors = {color for _, color in Image.open(sheets[0]).getcolors(1 << 24)}
    rgb = {name: tuple(int(name[place : place + 2], 16) for place in (1, 3, 5)) for name in (GREEN, RED)}
    num_wrong = sum(not rollout.reward_terms["picked"] for rollout in greedy)
    assert rgb[GREEN] in colors and (rgb[RED] in colors) == (num_wrong > 0)


def test_a_sheet_shows_what_was_heard_where_it_was(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A contact sheet frames the target and a wrong pick. The oracle is one pixel of each frame."""
    from megatron_rl.tasks.lewis import sheets

    example = speaker_of(built).examples("eval")[0]
    target = example.payload["target"]
    wrong = (target + 1) % 3
    logprobs = [-5.0 if place != wrong else -0.1 for place in range(3)]
    sheet = sheets.draw_contact_sheet([(example, REPLY, make_listener_score(logprobs)), (example, "", None)])
    first = 2 * sheets.MARGIN + sheets.IMAGE_SIDE + 7 * sheets.LINE_CHARS
    for place in range(3):
        left = first + place * (sheets.IMAGE_SIDE + sheets.MARGIN)
        expected = GREEN if place == target else RED if place == wrong else sheets.PLAIN
        assert "#{:02x}{:02x}{:02x}".format(*sheet.getpixel((left - 1, sheets.MARGIN + 50))) == expected
    below = sheets.IMAGE_SIDE + sheets.LINE_HEIGHT + 3 * sheets.MARGIN + 50
    assert "#{:02x}{:02x}{:02x}".format(*sheet.getpixel((first + wrong * (sheets.IMAGE_SIDE + sheets.MARGIN) - 1, below))) == sheets.PLAIN


def test_a_narrow_sheet_shows_the_target_and_the_pick(built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a game has more candidates than fit into a row, the sheet contains the target and the
    pick. Their frames are checked from left to right."""
    from megatron_rl.tasks.lewis import sheets

    monkeypatch.setattr(sheets, "MAX_CANDIDATES_SHOWN", 2)
    example = speaker_of(built).examples("eval")[0]
    example.payload["target"] = 2
    first = 2 * sheets.MARGIN + sheets.IMAGE_SIDE + 7 * sheets.LINE_CHARS
    for logprobs, frames in (([-0.1, -5.0, -5.0], [RED, GREEN]), ([-5.0, -0.1, -5.0], [RED, GREEN]), (None, [sheets.PLAIN, GREEN])):
        sheet = sheets.draw_contact_sheet([(example, REPLY, make_listener_score(logprobs) if logprobs else None)])
        lefts = [first + place * (sheets.IMAGE_SIDE + sheets.MARGIN) for place in range(2)]
        assert ["#{:02x}{:02x}{:02x}".format(*sheet.getpixel((left - 1, sheets.MARGIN + 50))) for left in lefts] == frames


def test_a_demonstrated_listener_hears_of_every_candidate(built: tuple[Path, Path]) -> None:
    """Yes and no are equally frequent in 120 demonstrations of one round, and no is equally
    frequent for each other candidate, within four standard errors."""
    (example, *_) = speaker_of(built).examples("train")
    counts: Counter[tuple[str, bytes]] = Counter()
    for each in make_demonstrations([example], "heard", num=120, seed=0):
        asked, answered = each.messages
        (picture,) = (part["image"] for part in asked["content"] if part["type"] == "image")
        counts["".join(part["text"] for part in answered["content"]), picture.tobytes()] += 1
    candidates, target = example.payload["candidates"], example.payload["target"]
    keys = [("yes" if place == target else "no", candidate.open().tobytes()) for place, candidate in enumerate(candidates)]
    assert {*counts} == {*keys} and len(keys) == 3
    for key in keys:
        share = 0.5 if key[0] == "yes" else 0.25
        assert abs(counts[key] - 120 * share) < 4 * (120 * share * (1 - share)) ** 0.5


def test_options_come_from_the_command_line() -> None:
    """Options on the command line, in the form that launch/lewis.sh uses, become the task's own
    dataclass."""
    given = compose_settings(["task=lewis_speaker", "task.options.accuracy=binary", "task.options.log=x", "model.path=m", "run.dir=r"])
    assert (given.task.options.accuracy, given.task.options.log, given.task.max_turns) == ("binary", "x", 1)
    other = compose_settings(["task=lewis_listener", "task.options.reward=selection", "model.path=m", "run.dir=r"])
    assert isinstance(other.task.options, LewisListenerOptions) and other.task.options.reward == "selection"


def test_words_for_a_tokenizer_are_those_of_the_games(built: tuple[Path, Path]) -> None:
    """The builder's words.txt contains the prompts and descriptions of the game."""
    texts = (built[1] / "words.txt").read_text()
    assert all(
        text in texts for text in (PROMPT.format(category="kind1"), write_vague_description(category="kind0"), "The kind1 is purple, ")
    )
    assert json.loads((built[1] / "catalogue.json").read_text())["splits"]


def test_the_sheets_of_two_engines_do_not_meet(tmp_path: Path) -> None:
    """Two contact sheets saved to one folder get different names."""
    for _ in range(2):
        ContactSheets(tmp_path)._save_sheet(Image.new("RGB", (2, 2)))
    assert len(list(tmp_path.iterdir())) == 2
