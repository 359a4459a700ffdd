"""Tests ALFWorld with TextWorld. The oracles are the planner and TextWorld itself."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.rollout.task import Step
from megatron_rl.tasks.alfworld.game_files import load_transcript
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND
from megatron_rl.tasks.alfworld.player_pool import make_player_pool
from megatron_rl.tasks.alfworld.scene_prompts import write_reply
from megatron_rl.tasks.alfworld.task import MISTAKE_PROBABILITY, AlfworldTask
from megatron_rl.tasks.process_pool import ProcessPool
from megatron_rl.types import Example, Message, Rollout
from tests.conftest import ROOT, SUPPORT
from tests.support.alfworld_episodes import extract_text, make_task, run_replies


@dataclass(slots=True)
class Loop:
    """One event loop for all tests, with one player server."""

    runner: asyncio.Runner
    players: ProcessPool

    def play(self, task: AlfworldTask, example: Example, replies: list[str], seed: int = 0) -> tuple[Message, list[Step]]:
        return self.runner.run(run_replies(self.shared(task), example, replies, seed))

    def shared(self, task: AlfworldTask) -> AlfworldTask:
        task.player_pool = self.players
        return task


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with asyncio.Runner() as runner:
        players = make_player_pool(4, timeout_s=60)
        yield Loop(runner, players)
        runner.run(players.close())


def rates(kind: str, thing: str, commands: list[str]) -> list[float]:
    """Return the share of goal conditions that are met after each command of a winning plan,
    computed from the words of the commands alone."""
    shares, held, changed, placed, lit = [], False, False, 0, False
    for command in commands:
        verb = command.split()[0]
        held = (held or verb == "take") and verb != "move"
        changed |= verb == kind and command.split()[1] == thing
        placed += verb == "move"
        lit = (lit or verb == "use") and verb != "go"
        met = {"pick": placed, "two": placed, "look": held + lit}.get(kind, changed + 2 * placed)
        shares.append(met / {"pick": 1, "two": 2, "look": 2}.get(kind, 3))
    return shares


@pytest.mark.parametrize("progress", ["level", "change"])
def test_the_planner_wins_and_earns_what_is_stated(alfworld_games: Path, loop: Loop, progress: str) -> None:
    """The planner wins every game. It earns 50 for the win, and in each step the share of goal
    conditions that are met or, with progress=change, the change of this share."""
    task = make_task(alfworld_games, progress=progress)
    seen = set()
    for example in [*task.examples("train"), *task.examples("eval")]:
        replies = task.gold_replies(example)
        _, steps = loop.play(task, example, replies)
        thing = example.id.split("-")[1].lower()
        shares = rates(example.payload["kind"], thing, [json.loads(reply)["action"] for reply in replies])
        earned = shares if progress == "level" else [after - before for before, after in zip([0.0, *shares], shares, strict=False)]
        assert [step.reward for step in steps] == pytest.approx([*earned[:-1], earned[-1] + 50])
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True] and steps[-1].reason == "won"
        assert not any(step.tool_call.error for step in steps)
        seen.add(example.payload["kind"])
    assert seen == set(ALFWORLD_NAME_BY_KIND)


def test_texts_and_commands_are_textworlds(alfworld_games: Path, loop: Loop, tmp_path: Path) -> None:
    """Texts and commands along random play equal those of TextWorld's own environment with the
    object names of the package alfworld. Official games are read in the same way."""
    task, dice, ours, played = make_task(alfworld_games), random.Random(0), {}, {}
    for example in task.examples("train"):
        path = str(example.payload["game"])

        async def wander(path: str = path) -> tuple[list[list[object]], list[str]]:
            player = await loop.players.acquire(path)
            view = await player.send_request(game=path)
            views, commands = [[view["text"], view["commands"], view["is_won"]]], []
            while len(commands) < 12 and not view["is_won"]:
                commands.append(dice.choice([*view["commands"], "dance"]))
                view = await player.send_request(command=commands[-1])
                views.append([view["text"], view["commands"], view["is_won"]])
            loop.players.release(player)
            return views, commands

        ours[path], played[path] = loop.runner.run(wander())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "ALFWORLD_DATA": str(tmp_path)}
    itself = subprocess.run(
        [sys.executable, SUPPORT / "textworld_reference.py"], input=json.dumps(played), env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert itself.returncode == 0, itself.stderr
    for path, theirs in json.loads(itself.stdout).items():
        welcome, look, goal = theirs[0][0].split("\n\n")
        assert "Welcome" in welcome and goal == f"Your task is to: {load_transcript(Path(path).parent).task}."
        assert [[look, *theirs[0][1:]], *theirs[1:]] == ours[path]


def test_the_prompt_follows_the_game(alfworld_games: Path, loop: Loop) -> None:
    """Each prompt contains the task, the observation, the commands and the last two commands of the
    recorded game. Options replace the text or the image."""
    task = make_task(alfworld_games, history=2)
    example = task.examples("train")[0]
    transcript = load_transcript(Path(example.payload["game"]).parent)
    first, steps = loop.play(task, example, task.gold_replies(example))
    told = [extract_text(first), *(extract_text(step.messages[0]) for step in steps[:-1])]
    assert all(step.is_new_prompt and [part["type"] for part in step.messages[0]["content"]] == ["image", "text"] for step in steps[:-1])
    for number, (text, turn) in enumerate(zip(told, transcript.turns, strict=True)):
        assert transcript.task in text and turn.text in text and "; ".join(turn.commands) in text
        before = transcript.commands[max(0, number - 2) : number]
        assert (f"Before: {'; '.join(before)}." in text) if before else "Before" not in text
    silent, _ = loop.play(make_task(alfworld_games, observation="picture"), example, [])
    assert transcript.turns[0].text not in extract_text(silent) and silent["content"][0]["image"] is first["content"][0]["image"]
    blank, _ = loop.play(task := make_task(alfworld_games, eval_picture="blank"), task.examples("eval")[0], [])
    assert blank["content"][0]["image"].getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize(("invalid", "paid"), [("penalize", -1.0), ("repeat", 0.0), ("random", None)])
def test_what_a_reply_without_a_command_does(alfworld_games: Path, loop: Loop, invalid: str, paid: float | None) -> None:
    """A response without a command is always counted as invalid. The share of goal conditions is
    still paid: 1/3 for a thing that has been heated and is held."""
    task = make_task(alfworld_games, invalid=invalid)
    example = next(example for example in task.examples("train") if example.payload["kind"] == "heat")
    replies = task.gold_replies(example)
    heated = next(number for number, reply in enumerate(replies) if '"action": "heat' in reply)
    effects = set()
    for seed in range(4):
        _, (*_, before, after) = loop.play(task, example, [*replies[: heated + 1], "nonsense"], seed)
        assert (after.tool_call.error, after.tool_call.ran, after.done) == ("not JSON", False, False)
        effects.add(extract_text(after.messages[0]))
        assert loop.play(task, example, [*replies[: heated + 1], "nonsense"], seed)[1][-1].reward == after.reward
        if paid is not None:
            assert after.reward == pytest.approx(1 / 3 + paid) and extract_text(after.messages[0]) == extract_text(before.messages[0])
    assert (len(effects) > 1) == (invalid == "random")


def test_two_environments_at_once_do_not_mix(alfworld_games: Path, loop: Loop) -> None:
    """Six environments of different games share four players. Each has the same observations and
    rewards as when it is played alone."""
    task = loop.shared(make_task(alfworld_games))
    examples = task.examples("eval")
    dice = random.Random(1)
    golds = map(task.gold_replies, examples)
    replies = [[*gold[: dice.randrange(len(gold))], "nonsense"] for gold in golds]

    async def together() -> list[tuple[Message, list[Step]]]:
        return await asyncio.gather(*(run_replies(task, *each) for each in zip(examples, replies, strict=True)))

    for (first, steps), example, said in zip(loop.runner.run(together()), examples, replies, strict=True):
        alone, again = loop.play(task, example, said)
        assert extract_text(first) == extract_text(alone) and [step.reward for step in steps] == [step.reward for step in again]
        assert [extract_text(step.messages[0]) for step in steps] == [extract_text(step.messages[0]) for step in again]


def test_success_is_told_by_kind(alfworld_games: Path) -> None:
    """The reward terms record whether an episode was won, in total and for its kind. They do not
    change the reward."""
    rubric = make_task(alfworld_games).rubric
    for reason in ("won", ""):
        rollout = Rollout(task="alfworld", example_id="e", group=0, sample_index=0, reason=reason)
        score = asyncio.run(rubric.score(RewardInput(payload={"kind": "heat"}, rollout=rollout)))
        assert score.reward_terms == {"won": float(bool(reason)), "won_heat": float(bool(reason)), "return": 0.0} and score.reward == 0
        rollout.reward_terms = score.reward_terms
        assert rubric.is_solved(rollout) == bool(reason)


def test_demonstrations_are_turns_of_games_that_are_won(alfworld_games: Path) -> None:
    """Demonstrations are turns of won games: turns of the planner, or of a searcher that plans
    without knowing what it has not seen. The split "biased" has turns of the searcher with
    mistakes."""
    task = make_task(alfworld_games, history=3)
    shown, again = (task.demonstrations("correct", num=num, seed=3) for num in (200, 40))
    others = task.demonstrations("correct", num=40, seed=4)
    replies = [[extract_text(demonstration.messages[1]) for demonstration in each] for each in (shown, again, others)]
    assert replies[0][:40] == replies[1] != replies[2]
    gold = {reply for example in task.examples("train") for reply in task.gold_replies(example)}
    assert set(replies[0]) <= gold and len(set(replies[0])) > 0.7 * len(gold)
    folders = [Path(example.payload["game"]).parent for example in task.examples("train")]
    searched = {write_reply(turn.thoughts, turn.command) for folder in folders for turn in load_transcript(folder, "searcher").turns}
    assert {
        extract_text(demonstration.messages[1]) for demonstration in task.demonstrations("searching", num=100, seed=3)
    } <= searched - gold
    wrong = 0
    for demonstration in task.demonstrations("biased", num=400, seed=3):
        asked, reply = demonstration.messages
        (commands,) = [line for line in extract_text(asked).splitlines() if line.startswith("Actions: ")]
        assert json.loads(extract_text(reply))["action"] in commands[len("Actions: ") : -1].split("; ")
        wrong += extract_text(reply) not in searched
    assert 0.7 * MISTAKE_PROBABILITY < wrong / 400 < MISTAKE_PROBABILITY + 0.08
    with pytest.raises(ValueError, match="^sft.splits=wrong: "):
        task.demonstrations("wrong", num=1, seed=0)


def test_who_searches_wins(alfworld_games: Path, loop: Loop) -> None:
    """The searcher's recorded commands win every game."""
    task = make_task(alfworld_games)
    for example in [*task.examples("train"), *task.examples("eval")]:
        turns = load_transcript(Path(example.payload["game"]).parent, "searcher").turns
        _, steps = loop.play(task, example, [write_reply(turn.thoughts, turn.command) for turn in turns])
        assert [step.reason for step in steps] == [""] * (len(steps) - 1) + ["won"]
