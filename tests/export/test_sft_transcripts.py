"""SFT transcripts of recorded rollouts: thousands of random conversations are restored from their
tokens, and the selection of rollouts is checked by hand."""

import json
import math
import random
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings, ModelSettings
from megatron_rl.data.records import SPECIAL_TOKENS
from megatron_rl.data.transcripts import load_demonstrations
from megatron_rl.export.chat_messages import RESIZED_IMAGE_ERROR, TEMPLATE_TOKENS_ERROR, NotConvertible, sequence_to_messages
from megatron_rl.export.sft_transcripts import ExportSummary, export_transcripts, select_best
from megatron_rl.observe.recorder import save_images
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Message, Rollout, Status, TokenSequence
from tests.conftest import ROOT
from tests.observe.test_recorder import rollout
from tests.support import fork_server
from tests.support.random_episodes import PROTOCOLS, RandomEnv, RandomPolicy, run_random_episode

SIZES = {"min_pixels": 3136, "max_pixels": 12800}
CUT_AT = 40
NO_TEXT, EMPTY = "a response is not valid text", "a response is empty"
NUL = "a message contains a NUL character, which transcript files must not contain"
SETTINGS = EpisodeSettings(temperature=1.0, max_turns=4, max_new_tokens=CUT_AT, max_sequence_tokens=2000, max_images=5, seed=0)


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), **SIZES))


def played(seed: int, renderer: Renderer, protocol: ToolProtocol) -> tuple[Rollout, RandomEnv, RandomPolicy]:
    engine = RandomPolicy(renderer, random.Random(seed))
    rollout, world = run_random_episode(seed, renderer=renderer, engine=engine, protocol=protocol, settings=SETTINGS)
    return rollout, world, engine


def told(context: TokenSequence, renderer: Renderer) -> list[Message] | NotConvertible:
    try:
        return sequence_to_messages(context, renderer, max_new_tokens=CUT_AT)
    except NotConvertible as why:
        return why


def spoken(message: Message, renderer: Renderer) -> tuple[str, str]:
    """Return role and text of a message by hand: special tokens escaped, Unicode normalized to NFC,
    and images replaced by the key of their final version."""
    if isinstance(message["content"], str):
        return message["role"], message["content"]
    names = [name for name in renderer.tokenizer.get_added_vocab() if name.startswith("<|")]
    text = ""
    for part in message["content"]:
        if part["type"] == "image":
            text += f"[{renderer.image(part['image']).key}]"
            continue
        spelled = part["text"]
        for name in names:
            spelled = spelled.replace(name, f"< {name[1:]}")
        text += unicodedata.normalize("NFC", spelled)
    return message["role"], text


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_conversation_comes_back(renderer: Renderer, protocol: ToolProtocol) -> None:
    """Messages of environment and policy are restored with their images, or the error states the
    true reason why they cannot be."""
    untold, num_told, num_pictures = Counter(), 0, 0
    for seed in range(250):
        rollout, world, engine = played(seed, renderer, protocol)
        if rollout.status is Status.FAILED:
            continue
        (context,) = rollout.sequences
        found = told(context, renderer)
        if isinstance(found, NotConvertible):
            words = [renderer.tokenizer.decode(ids) for ids in engine.replies]
            reasons = {
                RESIZED_IMAGE_ERROR: any(renderer.final_size(*image.pil.size) != image.pil.size for image in context.images),
                NO_TEXT: any("\ufffd" in each for each in words),
                NUL: any(
                    "\0" in each for each in (*words, *(spoken(message, renderer)[1] for heard in world.sent_messages for message in heard))
                ),
                EMPTY: any(not each.removesuffix("<|im_end|>").strip() for each in words),
                TEMPLATE_TOKENS_ERROR: any(token in each.removesuffix("<|im_end|>") for each in words for token in SPECIAL_TOKENS),
            }
            assert reasons[str(found)]
            untold[str(found)] += 1
            continue
        expected: list[Message] = []
        for number, said in enumerate(engine.replies):
            reply = renderer.tokenizer.decode(said[:-1] if said[-1] == renderer.end_id else said)
            heard = world.sent_messages[number] if number == 0 or number < len(world.sent_messages) else []
            expected += [*heard, {"role": "assistant", "content": reply}]
        assert [spoken(message, renderer) for message in found] == [spoken(message, renderer) for message in expected]
        num_told += 1
        num_pictures += len(context.images)
    assert num_told > 30 and num_pictures > 30 and untold.keys() == {RESIZED_IMAGE_ERROR, NO_TEXT, NUL, TEMPLATE_TOKENS_ERROR, EMPTY}


def test_a_reply_that_was_cut_off_is_none(renderer: Renderer) -> None:
    """A response of max_new_tokens without an end token is rejected as truncated.

    One token less is a response that ended at a stop text.
    """
    messages = [{"role": "user", "content": "Name it."}, {"role": "assistant", "content": "one two three"}]
    context = renderer.transcript(messages)
    cut = replace(context, token_ids=context.token_ids[:-1], loss_mask=context.loss_mask[:-1])
    num = sum(cut.loss_mask)
    assert sequence_to_messages(cut, renderer, max_new_tokens=num + 1)[-1] == messages[-1]
    with pytest.raises(NotConvertible, match=r"^a response was truncated at task.max_new_tokens$"):
        sequence_to_messages(cut, renderer, max_new_tokens=num)
    assert sequence_to_messages(context, renderer, max_new_tokens=num)[-1] == messages[-1], "it has ended by itself"


def test_pictures_that_would_change_are_refused(renderer: Renderer, random_model: Path) -> None:
    """A sequence is rejected if its images would be resized by other pixel limits, or if an image
    is missing."""
    other = Renderer(ModelSettings(path=str(random_model), min_pixels=784, max_pixels=1600))
    rollouts = (played(seed, renderer, PROTOCOLS[0])[0] for seed in range(50))
    rollout = next(each for each in rollouts if each.images and not isinstance(told(each.sequences[0], renderer), NotConvertible))
    with pytest.raises(NotConvertible, match=f"^{RESIZED_IMAGE_ERROR}$"):
        sequence_to_messages(rollout.sequences[0], other, max_new_tokens=CUT_AT)
    bare = replace(rollout.sequences[0], images=[replace(image, pil=None) for image in rollout.sequences[0].images])
    with pytest.raises(NotConvertible, match=r"^an image is missing$"):
        sequence_to_messages(bare, renderer, max_new_tokens=CUT_AT)


@pytest.fixture(scope="module")
def recorded(renderer: Renderer, random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of two steps with two examples and several rollouts each.

    Two rollouts have the same text with different rewards.
    """
    run = tmp_path_factory.mktemp("recorded")
    prompt = [{"role": "user", "content": "Name it."}]
    first = [("a", "one", 1.0), ("a", "two", 2.0), ("a", "two", 0.5), ("b", "x", None), ("b", "y", -1.0)]
    rewards = {0: first, 1: [("a", "one", 3.0), ("b", "z", -2.0)]}
    for step, rows in rewards.items():
        rollouts = []
        for sample, (example, said, reward) in enumerate(rows):
            context = renderer.transcript([*prompt, {"role": "assistant", "content": said}])
            rollout = played(3, renderer, PROTOCOLS[0])[0]
            status = Status.FAILED if reward is None else Status.COMPLETED
            turn = replace(
                rollout.turns[0], text=said, token_span=(context.loss_mask.index(1), len(context.token_ids)), images=[], action_start=None
            )
            own = {
                "sequences": [context],
                "turns": [turn],
                "reward": reward,
                "status": status,
                "example_id": example,
                "sample_index": sample,
            }
            own |= {"source": "mine", "question": f"Which is {example}?", "answer": example.upper()}
            rollouts.append(replace(rollout, **own))
        save_images(run / "rollouts", rollouts)
        write_step(step_path(run / "rollouts", step), rollouts, step=step, num_gen_batches=1)
    (run / "config.yaml").write_text(
        f"model: {{path: {random_model}, min_pixels: 3136, max_pixels: 12800}}\ntask: {{max_new_tokens: {CUT_AT}}}\n"
    )
    return run


@pytest.mark.parametrize(
    ("best", "min_reward", "places"),
    [
        (1, 0.5, [(1, 1)]),
        (2, 0.5, [(1, 0), (1, 1)]),
        (3, 0.5, [(0, 1), (1, 0), (1, 1)]),
        (9, 0.5, [(0, 1), (1, 0), (1, 1), (1, 2)]),
        (9, 1.0, [(0, 1), (1, 0), (1, 1)]),
        (9, 1.5, []),
    ],
)
def test_of_equal_rollouts_the_later_are_taken(best: int, min_reward: float, places: list[tuple[int, int]], tmp_path: Path) -> None:
    """Among rollouts with equal rewards, later ones are preferred, and duplicates are dropped.

    By (step, place), the texts are p and q, then p, r and s. All but s have reward 1, and a reward
    equal to min_reward is enough.
    """
    for step, rows in enumerate(([("p", 1.0), ("q", 1.0)], [("p", 1.0), ("r", 1.0), ("s", 0.5)])):
        write_step(
            step_path(tmp_path, step),
            [rollout(sample, reward, text=said) for sample, (said, reward) in enumerate(rows)],
            step=step,
            num_gen_batches=1,
        )
    paths = {step: step_path(tmp_path, step) for step in range(2)}
    chosen = select_best(paths, max_per_example=best, min_reward=min_reward, summary=ExportSummary(best))
    assert [(each.step, each.row_index) for each in chosen] == places


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"max_per_example": 1, "min_reward": -math.inf}, [("b", "y", 0, -1.0), ("a", "one", 1, 3.0)]),
        (
            {"max_per_example": 2, "min_reward": -math.inf},
            [("a", "two", 0, 2.0), ("b", "y", 0, -1.0), ("a", "one", 1, 3.0), ("b", "z", 1, -2.0)],
        ),
        ({"max_per_example": 9, "min_reward": 1.0}, [("a", "two", 0, 2.0), ("a", "one", 1, 3.0)]),
        ({"max_per_example": 9, "min_reward": -math.inf, "first_step": 1}, [("a", "one", 1, 3.0), ("b", "z", 1, -2.0)]),
    ],
)
def test_which_are_taken(how: dict[str, float], expected: list[tuple], recorded: Path, renderer: Renderer, tmp_path: Path) -> None:
    """The best rollouts of each example are exported.

    Duplicate texts are exported once, and failed rollouts never.
    """
    export_transcripts(recorded / "rollouts", tmp_path, renderer, max_new_tokens=CUT_AT, **how)
    lines = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    assert [(line["id"], line["messages"][-1]["content"], line["step"], line["reward"]) for line in lines] == expected
    assert all(
        (line["source"], line["question"], line["answer"]) == ("mine", f"Which is {line['id']}?", line["id"].upper()) for line in lines
    )


def test_the_command(recorded: Path, renderer: Renderer, tmp_path: Path) -> None:
    """The command writes transcripts that SFT loads and that render to the recorded tokens.

    If nothing is selected it ends with an error.
    """
    launched = fork_server.run_script(ROOT / "launch" / "export.py", recorded, "--out", tmp_path / "out", "--min-reward", "2", timeout_s=60)
    assert launched.returncode == 0 and launched.stdout.startswith(
        "1 of 6 rollouts (one per example: --best 1), mean reward 3.000: 1 transcripts\n"
    )
    (shown,) = load_demonstrations(DataSettings(demonstrations=[str(tmp_path / "out" / "transcripts.jsonl")]), "transcripts", num=1, seed=0)
    again = renderer.transcript(shown.messages)
    expected = renderer.transcript([{"role": "user", "content": "Name it."}, {"role": "assistant", "content": "one"}])
    assert (again.token_ids, again.loss_mask) == (expected.token_ids, expected.loss_mask)
    empty = fork_server.run_script(ROOT / "launch" / "export.py", recorded, "--out", tmp_path / "none", "--min-reward", "7", timeout_s=60)
    assert empty.returncode == 1 and f"error: {recorded}: no rollout meets the criteria; lower --min-reward" in empty.stdout
    lost = fork_server.run_script(ROOT / "launch" / "export.py", tmp_path / "nowhere", "--out", tmp_path / "none", timeout_s=60)
    assert lost.returncode == 1 and f"error: {tmp_path}/nowhere/config.yaml: cannot be read (" in lost.stdout


def test_pictures_go_along(renderer: Renderer, tmp_path: Path) -> None:
    """A transcript with its images renders to the recorded sequence, token for token."""
    rollouts = [played(seed, renderer, PROTOCOLS[0])[0] for seed in range(80)]
    rollouts = [replace(each, reward=1.0, example_id=str(seed)) for seed, each in enumerate(rollouts) if each.status is not Status.FAILED]
    folder = tmp_path / "rollouts"
    save_images(folder, rollouts)
    write_step(step_path(folder, 0), rollouts, step=0, num_gen_batches=1)
    exported = export_transcripts(folder, tmp_path / "out", renderer, max_per_example=1, min_reward=0.0, max_new_tokens=CUT_AT)
    lines = [json.loads(line) for line in (tmp_path / "out" / "transcripts.jsonl").read_text().splitlines()]
    data = DataSettings(demonstrations=[str(tmp_path / "out" / "transcripts.jsonl")])
    shown = load_demonstrations(data, "transcripts", num=len(lines), seed=0)
    assert not any("not read" in line for line in shown.warnings)
    assert len(lines) == exported.num_transcripts > 10 and sum(exported.skip_reasons.values()) == len(rollouts) - len(lines)
    words = {renderer.describe_sequence(renderer.transcript(each.messages)).removesuffix("<|im_end|>") for each in shown}
    sources = [each.sequences[0] for each in rollouts if each.example_id in {line["id"] for line in lines}]
    assert words == {renderer.describe_sequence(context).removesuffix("<|im_end|>") for context in sources}
    assert sum(len(context.images) for context in sources) > 10
