"""Generated ALFWorld games: train and eval use different scenes, generation is reproducible, the
planner wins every game, and games can be made small.
"""

import json
import random
import re
import shutil
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.tasks.alfworld.game_files import GAME_FILE, TRANSCRIPT_FILES, load_transcript
from megatron_rl.tasks.alfworld.game_generator import find_alfworld_package, generate_drafts
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND, KIND_BY_ALFWORLD_NAME, AlfworldGoal
from megatron_rl_tools.data import make_tiny_qwen2_5_vl as tiny
from megatron_rl_tools.data.make_alfworld import PARTIAL_SUFFIX, TEXTS_FILE, main

SCENES = {"train": {*range(7, 31)}, "eval": {*range(1, 7)}}
"""Floor plan numbers per split, modulo 100; the hundreds digit is the room type."""


def facts_at_start(problem: str) -> dict[str, set[tuple[str, ...]]]:
    facts = defaultdict(set)
    for fact in re.findall(r"^\((\w+ [\w ]+)\)$", problem.lower().partition("(:init")[2], re.MULTILINE):
        name, *arguments = fact.split()
        facts[name].add(tuple(arguments))
    return facts


@pytest.mark.parametrize("kind", ALFWORLD_NAME_BY_KIND)
@pytest.mark.parametrize(("places", "things"), [(4, 3), (6, 5), (0, 0)])
def test_drafts_are_of_their_scene_and_not_yet_won(kind: str, places: int, things: int) -> None:
    """Generated games use scenes of their split, do not start with any goal condition met, respect
    the size limits, and place every object once, in a receptacle that can contain it
    (desk lamps excepted).
    """
    pytest.importorskip("alfworld", reason="without launch/install_alfworld.sh")
    rules = find_alfworld_package()
    for split in ("train", "eval"):
        made = generate_drafts(rules, split=split, kind=kind, rng=random.Random(0), max_receptacles=places, max_objects=things)
        for draft in islice(made, 25):
            assert draft.goal.kind == kind and draft.goal.scene % 100 in SCENES[split]
            facts = facts_at_start(draft.pddl_problem)
            met, conditions = draft.goal.count_met_conditions(facts)
            assert met == 0 < conditions
            receptacles, lying = facts["receptacletype"], facts["inreceptacle"]
            assert not places or len(receptacles) <= places
            assert not things or len(lying) <= things
            assert len(lying) == len(facts["objecttype"]) == len(dict(lying)), "everything lies in one place"
            there = {place: where for place, where in facts["receptacleatlocation"]}
            assert len(set(there.values())) == len(there) and {place for _, place in lying} <= there.keys()
            kinds, holds = dict(receptacles) | dict(facts["objecttype"]), facts["cancontain"]
            assert all((kinds[place], kinds[thing]) in holds for thing, place in lying if not thing.startswith("desklamp"))
            assert draft.goal.object_type.lower() in draft.task_text and draft.goal.receptacle_type.lower() in draft.task_text


def test_games_are_whole_and_held_out_by_scene(alfworld_games: Path) -> None:
    scenes = {}
    for split in ("train", "eval"):
        found = sorted((alfworld_games / split).rglob(GAME_FILE))
        goals = [AlfworldGoal.from_folder_name(path.parents[1].name) for path in found]
        assert sorted(goal.kind for goal in goals) == sorted(ALFWORLD_NAME_BY_KIND)
        scenes[split] = {goal.scene for goal in goals}
        for path, goal in zip(found, goals, strict=True):
            game, told = json.loads(path.read_text()), json.loads((path.parent / "traj_data.json").read_text())
            transcript = load_transcript(path.parent)
            assert (
                game["solvable"]
                and game["walkthrough"] == transcript.commands
                and f"Your task is to: {transcript.task}." in game["grammar"]
            )
            assert KIND_BY_ALFWORLD_NAME[told["task_type"]] == goal.kind and told["scene"] == {"scene_num": goal.scene}
            assert goal.receptacle_type in (told["pddl_params"]["parent_target"], told["pddl_params"]["toggle_target"])
            searched = load_transcript(path.parent, "searcher")
            assert len(searched.turns) >= len(transcript.turns) and searched.turns[0].thoughts == f"Next: find {goal.object_type.lower()}."
            assert all(turn.command in turn.commands for turn in (*transcript.turns, *searched.turns))
    assert not list(alfworld_games.rglob(".*"))
    assert not scenes["train"] & scenes["eval"]


def test_the_same_arguments_make_the_same_games_and_go_on(alfworld_games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run keeps existing games and creates only the missing one, which equals the game of
    an uninterrupted run. Another seed creates other games.
    """
    again = tmp_path / "again"
    shutil.copytree(alfworld_games, again)
    files = {path.relative_to(again): path.read_bytes() for path in again.rglob("*.*") if path.is_file()}
    lost = sorted((again / "train").glob("*/*"))[2]
    shutil.rmtree(lost)
    kept = next((again / "eval").rglob(GAME_FILE))
    kept.write_text(kept.read_text() + " ")
    (again / PARTIAL_SUFFIX / "train_trial_00001_0").mkdir(parents=True)
    sizes = ["--num-train", "6", "--num-eval", "6", "--processes", "1"]
    assert main(["--out", str(again), *sizes]) == 0
    assert f"12 games in {again}, 1 of them new" in capsys.readouterr().out
    files[kept.relative_to(again)] += b" "
    assert {path.relative_to(again): path.read_bytes() for path in again.rglob("*.*") if path.is_file()} == files
    other = tmp_path / "other"
    assert main(["--out", str(other), "--num-train", "1", "--num-eval", "1", "--seed", "1", "--processes", "1"]) == 0
    assert next((other / "train").glob("*/*")).parent.name not in {path.parent.name for path in (again / "train").glob("*/trial_00000")}


def test_transcripts_of_games_that_lie_there(alfworld_games: Path, tmp_path: Path) -> None:
    """Transcripts of existing games follow the game's walkthrough, as official games have one, or
    the planner's solution if the game has none. Both equal the generated transcripts.
    """
    for number, folder in enumerate(sorted((alfworld_games / "train").glob("*/*"))[:2]):
        copy = tmp_path / folder.parent.name / folder.name
        copy.mkdir(parents=True)
        game = json.loads((folder / GAME_FILE).read_text())
        (copy / GAME_FILE).write_text(json.dumps({**game, "walkthrough": game["walkthrough"] if number else None}))
    assert main(["--transcribe", str(tmp_path), "--processes", "1"]) == 0
    written = [path for name in TRANSCRIPT_FILES.values() for path in tmp_path.rglob(name)]
    assert len(written) == 4
    for path in written:
        assert path.read_bytes() == (alfworld_games / "train" / path.relative_to(tmp_path)).read_bytes()


def test_a_tokenizer_for_its_words(alfworld_games: Path, random_model: Path, tmp_path: Path) -> None:
    """A tokenizer trained on the games' texts needs at least 33% fewer tokens than one that was
    not.
    """
    tiny.make_checkpoint(tmp_path / "nano", words=alfworld_games / TEXTS_FILE)
    text = (alfworld_games / TEXTS_FILE).read_text()
    own, other = (len(AutoTokenizer.from_pretrained(folder)(text).input_ids) for folder in (tmp_path / "nano", random_model))
    assert own < 0.67 * other
    with pytest.raises(ValueError, match="^--words="):
        tiny.make_checkpoint(tmp_path / "none", words=tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out=None: set exactly one of --out and --transcribe"),
        (["--out", "x", "--transcribe", "y"], "--out=x: set exactly one"),
        (["--transcribe", "/nowhere"], "--transcribe=/nowhere: no such folder"),
        (["--out", "x", "--num-train", "0"], "--num-train=0: must be at least 1"),
        (["--out", "x", "--places", "3"], "--places=3: must be at least 4, or 0 for as many as in ALFWorld"),
        (["--out", "x", "--things", "-1"], "--things=-1: must be at least 3"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fast_downward", reason="without launch/install_alfworld.sh")
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(said)
