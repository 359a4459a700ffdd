"""Tests ALFWorld without TextWorld: goals, responses, prompts, images, and the folders that are
searched for games."""

import asyncio
import json
import timeit
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cli.help import read_field_docs
from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.config.task_options import AlfworldOptions
from megatron_rl.registry import build_task
from megatron_rl.tasks.alfworld import game_files
from megatron_rl.tasks.alfworld.action_parser import ACTION_PARSERS, InvalidAction, parse_substring_action
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND, AlfworldGoal
from megatron_rl.tasks.alfworld.scene_image import IMAGE_SIDE, draw_blank, draw_text
from megatron_rl.tasks.alfworld.scene_prompts import GameObservation, write_prompt, write_reply, write_thoughts
from megatron_rl.tasks.alfworld.search_expert import SearchExpert
from megatron_rl.tasks.alfworld.task import AlfworldEnv
from tests.contracts.test_configs import settings_of
from tests.contracts.test_field_docs import stands_alone

KITCHEN = (
    "objecttype apple1 appletype; objecttype apple2 appletype; objecttype mug1 mugtype; objecttype lamp1 desklamptype; "
    "receptacletype fridge1 fridgetype; receptacletype table1 diningtabletype; receptacletype table2 diningtabletype; "
    "receptacleatlocation fridge1 loc1; receptacleatlocation table1 loc2; receptacleatlocation table2 loc3; "
)
COMMANDS = ["go to cabinet 1", "go to cabinet 10", "go to cabinet 2", "look", "take apple 1 from cabinet 2"]


def facts_of(text: str) -> dict[str, set[tuple[str, ...]]]:
    facts = defaultdict(set)
    for fact in filter(None, text.split("; ")):
        name, *arguments = fact.split()
        facts[name].add(tuple(arguments))
    return facts


@pytest.mark.parametrize(
    ("kind", "place", "state", "met"),
    [
        ("pick", "Fridge", "inreceptacle apple1 table1", (0, 1)),
        ("pick", "Fridge", "inreceptacle mug1 fridge1", (0, 1)),
        ("pick", "Fridge", "inreceptacle apple2 fridge1", (1, 1)),
        ("two", "DiningTable", "inreceptacle apple1 table1; inreceptacle apple2 table2", (1, 2)),
        ("two", "DiningTable", "inreceptacle apple1 table2; inreceptacle apple2 table2", (2, 2)),
        ("two", "DiningTable", "inreceptacle apple1 table2; inreceptacle mug1 table2", (1, 2)),
        ("heat", "DiningTable", "ishot mug1", (0, 3)),
        ("heat", "DiningTable", "ishot apple1; holds agent1 apple1", (1, 3)),
        ("heat", "DiningTable", "inreceptacle apple1 table1", (1, 3)),
        ("heat", "DiningTable", "ishot apple1; inreceptacle apple2 table1", (2, 3)),
        ("heat", "DiningTable", "ishot apple1; inreceptacle apple1 table1", (3, 3)),
        ("cool", "DiningTable", "ishot apple1; inreceptacle apple1 table1", (1, 3)),
        ("cool", "DiningTable", "iscool apple1; inreceptacle apple1 table1", (3, 3)),
        ("clean", "DiningTable", "isclean apple1; inreceptacle apple1 table1", (3, 3)),
        ("look", "DeskLamp", "inreceptacle lamp1 table1; atlocation agent1 loc2", (0, 2)),
        ("look", "DeskLamp", "inreceptacle lamp1 table1; atlocation agent1 loc2; istoggled lamp1", (1, 2)),
        ("look", "DeskLamp", "inreceptacle lamp1 table1; atlocation agent1 loc1; istoggled lamp1; holds agent1 apple1", (1, 2)),
        ("look", "DeskLamp", "inreceptacle lamp1 table1; atlocation agent1 loc2; istoggled lamp1; holds agent1 apple1", (2, 2)),
        ("look", "DeskLamp", "inreceptacle lamp1 table1; atlocation agent1 loc2; istoggled lamp1; holds agent1 mug1", (1, 2)),
    ],
)
def test_goal_conditions_by_hand(kind: str, place: str, state: str, met: tuple[int, int]) -> None:
    """The numbers of met goal conditions equal hand-counted ones, by the rules of ALFWorld's
    env/tasks.py."""
    assert AlfworldGoal(kind, "Apple", place, 1).count_met_conditions(facts_of(KITCHEN + state)) == met


def test_a_folder_names_its_goal() -> None:
    goal = AlfworldGoal.from_folder_name("look_at_obj_in_light-AlarmClock-None-DeskLamp-308")
    assert (
        goal == AlfworldGoal("look", "AlarmClock", "DeskLamp", 308)
        and goal.folder_name == "look_at_obj_in_light-AlarmClock-None-DeskLamp-308"
    )
    others = ("pick_and_place_with_movable_recep-Fork-Bowl-SinkBasin-7", "pick_and_place_simple-AppleSliced-None-Fridge-3", "x", ".partial")
    assert [AlfworldGoal.from_folder_name(folder) for folder in others] == [None] * 4
    assert len(ALFWORLD_NAME_BY_KIND) == 6 and {
        AlfworldGoal.from_folder_name(f"{name}-Mug-None-Desk-301").kind for name in ALFWORLD_NAME_BY_KIND.values()
    } == {*ALFWORLD_NAME_BY_KIND}


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('{"thoughts": "go to cabinet 1?", "action": "go to cabinet 10"}', "go to cabinet 10"),
        ('{"action": "Go to Cabinet 1"}', "go to cabinet 1"),
        ('{"action": "go to cabinet 11"}', InvalidAction.NO_ACTION),
        ('"action": first look, then go to cabinet 2', "go to cabinet 2"),
        ("I want to take apple 1 from cabinet 2", "take apple 1 from cabinet 2"),
        ("take apple 1 from cabinet 2 and then some more words than thirty", InvalidAction.NO_ACTION),
        ("go to cabinet \u0661", InvalidAction.NO_ACTION), ("", InvalidAction.NO_ACTION), ("look" + " " * 5000, InvalidAction.TOO_LONG),
        ("__import__('os').system('look')", "look"), ("action: look" + "." * 40, InvalidAction.NO_ACTION),
    ],
)  # fmt: skip
def test_rl4vlms_reading(text: str, command: str) -> None:
    """The rl4vlm reading returns the first command, in the order of the command list, that the
    response contains. As in RL4VLM, the order within the response does not matter."""
    read = parse_substring_action(text, COMMANDS)
    assert (read if isinstance(read, InvalidAction) else COMMANDS[read]) == command


PIECES = [*COMMANDS, '"action":', '{"action": "', '"}', "{", "}", "[", "1", "10", "\uff11", "\x00", "\u0130", "__class__", "(" * 500]


@pytest.mark.parametrize("reading", ACTION_PARSERS)
@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_text_breaks_a_reading(reading: str, text: str) -> None:
    """Every text is read as one admissible command that it contains, or as a reason why it has
    none. `lower` may lengthen a text: dotted capital I."""
    read = ACTION_PARSERS[reading](text, COMMANDS)
    assert isinstance(read, InvalidAction) or COMMANDS[read] in text.lower()
    if reading == "json" and not isinstance(read, InvalidAction):
        assert json.loads(text)["action"] == COMMANDS[read]


@pytest.mark.parametrize("reading", ACTION_PARSERS)
def test_a_reading_takes_microseconds(reading: str) -> None:
    """Reading the worst responses against 60 commands takes less than 2 ms. The best of 20 tries
    counts, because other processes use the machine too."""
    commands = [f"go to cabinet {number}" for number in range(60)]
    worst = [
        "(" * 4096,
        "[" * 4096,
        "go to cabinet 99" * 256,
        '{"action":' * 400,
        '"action": ' + "go to cabinet 599 " * 220,
        "\u0130" * 4096,
    ]
    for text in worst:
        assert min(timeit.repeat(lambda text=text: ACTION_PARSERS[reading](text, commands), number=1, repeat=20)) < 2e-3


def test_a_reply_says_what_it_is_about() -> None:
    """A demonstrated response names the next goal, and both readings find its command."""
    commands = ["go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "look"]
    assert write_thoughts(commands) == "Next: take apple 1 from fridge 1." and write_thoughts(["look"]) == "Next: look."
    reply = write_reply(write_thoughts(commands), commands[0])
    assert list(json.loads(reply)) == ["thoughts", "action"]
    assert ACTION_PARSERS["json"](reply, commands) == ACTION_PARSERS["rl4vlm"](reply, commands) == 0


def test_the_prompt_says_all_that_is_told_and_nothing_else() -> None:
    """The prompt contains task, observation, history and commands. Without text, it contains
    neither observation nor history."""
    view = GameObservation(
        "On the shelf 1, you see a mug 1.", ["look", "take mug 1 from shelf 1"], is_won=False, num_met=0, num_conditions=1
    )
    whole = write_prompt("put a mug in desk", view, history=["go to shelf 1"])
    for part in ("put a mug in desk.", view.text, "Before: go to shelf 1.", "look; take mug 1 from shelf 1."):
        assert part in whole
    silent = write_prompt("put a mug in desk", view, has_text=False)
    assert view.text not in silent and "Before" not in silent and "look; take" in silent


def test_a_picture_has_its_words_as_large_as_they_fit() -> None:
    """The drawn text is as large as fits into the image. The oracle is the height of the first line
    of a short and a long text."""
    short, long = (np.array(draw_text(text).convert("L")) for text in ("You see a mug 1.", "You see a mug 1. " * 12))
    assert short.shape == (IMAGE_SIDE, IMAGE_SIDE) and short.min() == 0 and short[:, -8:].min() == 255
    heights = [np.flatnonzero((pixels < 128).any(1)) for pixels in (short, long)]
    first_line = [rows[: np.flatnonzero(np.diff(rows, append=999) > 1)[0] + 1].size for rows in heights]
    assert first_line[0] > 1.3 * first_line[1] and heights[1].max() > 200, "few words are drawn large"
    assert np.array(draw_text("a b")).tobytes() != np.array(draw_text("a c")).tobytes() and np.array(draw_blank("a b")).min() == 255
    draw_text("w" * 5000)
    draw_text("")


def a_game(root: Path, folder: str, trial: str, **content: object) -> Path:
    path = root / folder / trial / game_files.GAME_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pddl_domain": "", **content}))
    return path


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find games by their files alone. No game is played here, so the packages that play games need
    not be installed."""
    monkeypatch.setattr(game_files, "REQUIRED_PACKAGES", {})


def task_of(tmp_path: Path, **options: object) -> object:
    data = DataSettings(train=[str(tmp_path / "train")], eval=[str(tmp_path / "eval")], max_eval=2)
    return build_task(TaskSettings(name="alfworld", data=data, options=AlfworldOptions(**options)))


@pytest.mark.usefixtures("without_packages")
def test_games_are_found_in_an_order_of_their_own(tmp_path: Path) -> None:
    """Solvable games of supported kinds are found, in the same order each time, and at most
    `max_eval` for evaluation."""
    for number in range(4):
        a_game(tmp_path / "train", "pick_and_place_simple-Mug-None-Desk-308", f"trial_{number}")
        a_game(tmp_path / "eval", "look_at_obj_in_light-Mug-None-DeskLamp-302", f"trial_{number}", solvable=True)
    a_game(tmp_path / "train", "pick_and_place_simple-Pen-None-Desk-308", "trial_9", solvable=False)
    a_game(tmp_path / "train", "pick_and_place_with_movable_recep-Pen-Bowl-Desk-308", "trial_9")
    task = task_of(tmp_path)
    train = task.examples("train")
    assert {example.id.split("/")[0] for example in train} == {"pick_and_place_simple-Mug-None-Desk-308"} and len(train) == 4
    assert [example.payload["kind"] for example in task.examples("eval")] == ["look"] * 2
    assert [example.id for example in train] == [example.id for example in task_of(tmp_path).examples("train")]
    assert {example.payload["picture"] for example in train} == {"drawn"}
    shown = task_of(tmp_path, eval_picture="blank").examples("eval")
    assert {example.payload["picture"] for example in shown} == {"blank"}
    with pytest.raises(ValueError, match=r"^task.data.train=.*--transcribe"):
        task.demonstrations("correct", num=1, seed=0)
    assert task.gold_replies(train[0]) == []
    assert (task.find_action('{"thoughts": "", "action": "go"}'), task.find_action("go")) == (17, None)


@pytest.mark.usefixtures("without_packages")
def test_official_games_are_where_alfworld_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data settings, games come from the folders of ALFWORLD_DATA: train and
    valid_unseen."""
    a_game(tmp_path / "json_2.1.1/train", "pick_and_place_simple-Mug-None-Desk-308", "trial_1")
    a_game(tmp_path / "json_2.1.1/valid_unseen", "pick_and_place_simple-Mug-None-Desk-10", "trial_1")
    a_game(tmp_path / "json_2.1.1/valid_seen", "pick_and_place_simple-Mug-None-Desk-308", "trial_2")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    task = build_task(TaskSettings(name="alfworld"))
    assert [[example.payload["scene"] for example in task.examples(split)] for split in ("train", "eval")] == [[308], [10]]


@pytest.mark.usefixtures("without_packages")
def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makes = r".*python tools/data/make_alfworld.py --out data/alfworld"
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    task = build_task(TaskSettings(name="alfworld"))
    with pytest.raises(ValueError, match=rf"^task.data.eval=\[\]: {makes}"):
        task.examples("eval")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=rf"^ALFWORLD_DATA={tmp_path}/nowhere/json_2.1.1/train: no such folder; {makes}"):
        build_task(TaskSettings(name="alfworld")).examples("train")
    with pytest.raises(ValueError, match=rf"^task.data.train={tmp_path}/train: no such folder; {makes}"):
        task_of(tmp_path).examples("train")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=rf"^task.data.train={tmp_path}/train: contains no game.tw-pddl .*{makes}"):
        task_of(tmp_path).examples("train")
    a_game(tmp_path / "train", "pick_and_place_simple-Mug-None-Desk-308", "trial_1")
    monkeypatch.setattr(game_files, "REQUIRED_PACKAGES", {"no_such_module": "textworld"})
    with pytest.raises(ValueError, match=r"^task.name=alfworld: requires textworld; run: bash launch/install_alfworld.sh"):
        task_of(tmp_path).examples("train")


def test_options_and_turns(tmp_path: Path) -> None:
    chosen = settings_of("task=alfworld", "model.path=here", "run.dir=there", "task.options.progress=change", "task.options.history=4")
    assert chosen.task.options == AlfworldOptions(progress="change", history=4) and chosen.task.max_turns == 50
    assert all(stands_alone(doc) for doc in read_field_docs(AlfworldOptions).values())
    with pytest.raises(ValueError, match="^task.max_turns=51: must be at most 50 "):
        build_task(TaskSettings(name="alfworld", max_turns=51))
    for wrong in ({"reading": "x"}, {"invalid": "x"}, {"progress": "x"}, {"observation": "x"}, {"eval_picture": "x"},
                  {"history": -1}, {"processes": 0}, {"call_s": 0}):  # fmt: skip
        (name,) = wrong
        with pytest.raises(ValueError, match=rf"^task.options.{name}="):
            AlfworldOptions(**wrong)


def test_who_searches_gives_up_where_no_way_leads() -> None:
    """With an apple in hand that is to be heated, the searcher goes to the microwave. If there is
    none, it returns None and does not raise."""
    goal = AlfworldGoal.from_folder_name("pick_heat_then_place_in_recep-Apple-None-CounterTop-12")
    for places, expected in ((["microwave 1"], ("Next: heat apple.", "go to microwave 1")), ([], None)):
        searcher, commands = SearchExpert(goal), [f"go to {place}" for place in places]
        assert (
            searcher.choose_command(GameObservation("", ["take apple 1 from table 1"], is_won=False, num_met=0, num_conditions=3))[1]
            == "take apple 1 from table 1"
        )
        assert searcher.choose_command(GameObservation("", commands, is_won=False, num_met=0, num_conditions=3)) == expected


class Corridor:
    """Player pool and player at once: a game with 30 doors that is never won."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def acquire(self, game: str) -> "Corridor":
        return self

    def release(self, player: "Corridor") -> None:
        """No-op: nothing is held."""

    async def send_request(self, *, game: str = "", command: str = "") -> dict[str, object]:
        self.commands += [command] if command else []
        view = {
            "text": "Doors.",
            "commands": [f"open door {number}" for number in range(30)],
            "is_won": False,
            "num_met": 0,
            "num_conditions": 1,
        }
        return view | ({"task": "leave"} if game else {})


def walked(replies: list[str], *, seed: int = 0, **options: object) -> tuple[list[str], list[str]]:
    """Return the prompt of each turn and the commands that were played."""

    async def walk() -> list[str]:
        env = AlfworldEnv("game", player_pool=corridor, options=AlfworldOptions(**options))
        messages = [*await env.reset(seed)]
        for reply in replies:
            messages += (await env.step(reply)).messages
        await env.close()
        return [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]

    corridor = Corridor()
    return asyncio.run(walk()), corridor.commands


@pytest.mark.parametrize("history", [0, 1, 3])
def test_the_prompt_has_as_many_commands_as_history_says(history: int) -> None:
    doors = [f"open door {number}" for number in (4, 7, 1, 9)]
    prompts, played = walked([write_reply("", door) for door in doors], history=history)
    assert played == doors and len(prompts) == 5
    for number, shown in enumerate(prompts):
        before = doors[max(0, number - history) : number]
        assert f"Before: {'; '.join(before)}." in shown if before else "Before" not in shown


def test_commands_drawn_for_replies_without_one_are_the_seeds() -> None:
    """Random commands depend on the seed: members of a group draw the same ones, and another group
    draws others. By chance, no two seeds would agree on 12 commands out of 30."""
    drawn_by = [walked(["?"] * 12, seed=seed, invalid="random")[1] for seed in (5, 5, 6)]
    assert len(drawn_by[0]) == 12 and drawn_by[0] == drawn_by[1] != drawn_by[2]
    assert len(set(drawn_by[0])) > 4
