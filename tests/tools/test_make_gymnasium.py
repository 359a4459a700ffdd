"""Tests demonstrations of gymnasium environments: prompts, replies, random actions, selection and
errors.
"""

import asyncio
import json
import random
import runpy
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.data.transcripts import load_transcripts
from megatron_rl.tasks.gymnasium_envs.action_grammar import ActionGrammar
from megatron_rl.tasks.gymnasium_envs.demonstrations import DemonstrationPlayer, write_reply
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumTask
from megatron_rl.types import Message
from tests.conftest import ROOT
from tests.support.picture_environments import MODULE
from tools.data.make_gymnasium import main

WALK = (f"task.options.id={MODULE}:Walk-v0", "task.options.history=2", "task.options.image_side=48")
NAMED = ActionGrammar(low=[2], high=[4], is_integer=True, names=["walk", "rest", "jump"])
NUMBERED = ActionGrammar(low=[0], high=[3], is_integer=True, names=[])
LISTED = ActionGrammar(low=[0, 5], high=[2, 6], is_integer=True, is_list=True, names=[])
BOX = ActionGrammar(low=[-1.0], high=[1.0], is_integer=False, is_list=True, names=[])


def walk_and_rest(env: Any, observation: Any) -> Any:
    """Walk and rest in turn, and say how far it is."""
    assert env.unwrapped.num_steps == observation["steps"], "the environment and its last observation"
    return {"thoughts": f"{observation['steps']} steps done", "action": ("walk", "rest")[observation["steps"] % 2]}


def make(out: Path, *arguments: str, demonstrator: Any = walk_and_rest) -> list[dict[str, Any]]:
    """Run the tool and return the lines of its transcripts."""
    assert main(demonstrator, ["--out", str(out), "task=gymnasium", *WALK, *arguments]) == 0
    return [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]


def play_in_pool(seed: int, replies: list[str], options: dict[str, Any]) -> tuple[list[Message], float]:
    """Return the prompts that training gives for these replies, and the return of the episode."""

    async def play() -> tuple[list[Message], float]:
        env = task.env(task.examples("train")[seed])
        prompts, total = [*await env.reset(99)], 0.0
        for reply in replies:
            step = await env.step(reply)
            prompts, total = [*prompts, *step.messages], total + step.reward
        await env.close()
        await task.close()
        return prompts, total

    task = GymnasiumTask(TaskSettings(name="gymnasium", options=GymnasiumOptions(id=f"{MODULE}:Walk-v0", **options)))
    return asyncio.run(play())


def test_transcripts_have_the_prompts_of_training(tmp_path: Path) -> None:
    """Prompts, pictures and returns equal those of an episode in a process of the pool, in which
    the same actions are played. The reader of stage=sft returns them.
    """
    rows = make(tmp_path / "out", "--episodes", "2", "--first-seed", "3", "+task.options.kwargs.length=4")
    assert [(row["id"], row["step"]) for row in rows] == [(f"seed{seed}", step) for seed in (3, 4) for step in range(4)]
    read = load_transcripts([str(tmp_path / "out" / "transcripts.jsonl")], images_root="")
    assert not read.warnings and len(read) == len(rows)
    for number, seed in enumerate((3, 4)):
        shown = [read[row] for row in range(4 * number, 4 * number + 4)]
        replies = ["".join(part["text"] for part in messages[-1]["content"]) for messages in shown]
        assert [json.loads(reply) for reply in replies] == [
            {"thoughts": f"{step} steps done", "action": ("walk", "rest")[step % 2]} for step in range(4)
        ]
        prompts, total = play_in_pool(seed, replies, {"history": 2, "image_side": 48, "kwargs": {"length": 4}})
        assert [row["reward"] for row in rows[4 * number : 4 * number + 4]] == pytest.approx([total] * 4, abs=1e-12)
        for messages, prompt in zip(shown, prompts, strict=True):
            (given,) = messages[:-1]
            for part, expected in zip(given["content"], prompt["content"], strict=True):
                assert part["type"] == expected["type"]
                assert part["text"] == expected["text"] if "text" in part else np.array_equal(part["image"], expected["image"])
    assert [len([part for part in row["messages"][0]["content"] if part["type"] == "image"]) for row in rows] == [1, 2, 2, 2] * 2
    texts = (tmp_path / "out" / "words.txt").read_text()
    assert all(part["text"] in texts for row in rows for message in row["messages"] for part in message["content"] if "text" in part)
    origin = json.loads((tmp_path / "out" / "demonstrations.json").read_text())
    assert origin["demonstrator_file"] == "test_make_gymnasium.py" and origin["task_options"]["kwargs"] == {"length": 4}
    assert (origin["episodes"], origin["solved"], origin["turns"], origin["first_seed"]) == (2, 2, 8, 3)


def test_random_actions_are_played_and_not_imitated(tmp_path: Path) -> None:
    """The environment receives a random action in the stated fraction of the turns, and the reply
    of the demonstrator in the others. Transcripts have only the demonstrator's replies. A loop in
    gymnasium that draws from the same generator receives the same actions.
    """

    def play(env: Any, observation: str) -> int:
        received.append(observation)
        return 3

    received: list[str] = []
    settings = TaskSettings(name="gymnasium", options=GymnasiumOptions(id=f"{MODULE}:AnySpace-v0"), max_turns=400)
    player = DemonstrationPlayer(settings, play, random_fraction=0.4)
    episode = asyncio.run(player.play(7))
    assert {reply for _, reply in episode.turns} == {'{"action": 3}'} and len(episode.turns) == 400
    dice, expected = random.Random(7), ["none"]
    for _ in range(399):
        expected.append(f"int64 {dice.randint(0, 3) if dice.random() < 0.4 else 3}")
    assert received == expected
    counted = Counter(received)
    assert all(25 <= counted[f"int64 {action}"] <= 55 for action in range(3)), "40 expected of each"
    assert asyncio.run(player.play(7)).turns[-1][1] == '{"action": 3}' and received[400:] == expected


def test_only_solved_episodes_are_written(tmp_path: Path) -> None:
    """Gymnasium's own loop determines which seeds are solved; --all writes the others too."""
    returns = {}
    for seed in range(12):
        env = gymnasium.make(f"{MODULE}:Walk-v0", render_mode="rgb_array", disable_env_checker=True)
        np.random.seed(seed)
        env.reset(seed=seed)
        returns[f"seed{seed}"] = sum(env.step(action)[1] for action in (2, 3, 2))
    solved = {seed: total for seed, total in returns.items() if total >= 3}
    assert 1 < len(solved) < 11
    given = ("--episodes", "12", "task.options.success_reward=3")
    found = {row["id"]: row["reward"] for row in make(tmp_path / "solved", *given)}
    assert found == pytest.approx(solved)
    assert {row["id"]: row["reward"] for row in make(tmp_path / "all", *given, "--all")} == pytest.approx(returns)


@pytest.mark.parametrize(
    ("chosen", "grammar", "reply"),
    [
        ("rest", NAMED, '{"action": "rest"}'),
        (np.int64(3), NAMED, '{"action": "rest"}'),
        ({"thoughts": "stop", "action": 4}, NAMED, '{"thoughts": "stop", "action": "jump"}'),
        (np.array(2), NUMBERED, '{"action": 2}'),
        (np.array([2, 6]), LISTED, '{"action": [2, 6]}'),
        ((1, 5), LISTED, '{"action": [1, 5]}'),
        (np.array([[0.5]], np.float32), BOX, '{"action": [0.5]}'),
    ],
)
def test_replies_for_actions(chosen: Any, grammar: ActionGrammar, reply: str) -> None:
    assert write_reply(chosen, grammar) == reply


def test_replies_in_tags(tmp_path: Path) -> None:
    """The task plays the replies: the walk ends after four actions."""
    rows = make(tmp_path / "out", "--episodes", "1", "task.options.reply=tags", "+task.options.kwargs.length=4")
    assert [row["messages"][-1]["content"][0]["text"] for row in rows] == [
        f"<think>{step} steps done</think><answer>{('walk', 'rest')[step % 2]}</answer>" for step in range(4)
    ]
    with pytest.raises(ValueError, match="returned 'walk, rest, fly'"):
        write_reply("walk, rest, fly", NAMED)
    with pytest.raises(ValueError, match="an action is"):
        write_reply({"thoughts": "</think>", "action": "walk"}, NAMED, form="tags")


@pytest.mark.parametrize(
    ("chosen", "grammar", "reason"),
    [
        ("fly", NAMED, "no action"), (5, NAMED, "no action"), (True, NAMED, "no action"), (None, NAMED, "no action"),
        ({"a": 1}, NAMED, "no action"), (4, NUMBERED, "out of bounds"), (1.5, NUMBERED, "not a number"),
        ([1], LISTED, "wrong number of values"), (np.array([2.0]), BOX, "out of bounds"), (np.zeros(2), NUMBERED, "not a number"),
        ({"action": 1, "thoughts": {1, 2}}, NUMBERED, "cannot be written as JSON"),
    ],
)  # fmt: skip
def test_results_that_are_no_actions(chosen: Any, grammar: ActionGrammar, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        write_reply(chosen, grammar)


def fly(env: Any, observation: Any) -> str:
    return "walk" if observation["steps"] < 2 else "fly"


@pytest.mark.parametrize(
    ("arguments", "demonstrator", "line"),
    [
        (["task=vqa"], fly, "task=vqa: demonstrations need task=gymnasium"),
        (["--episodes", "0"], fly, "--episodes=0: must be at least 1"),
        (["--random", "1"], fly, "--random=1.0: must be at least 0 and below 1"),
        (["--episodes", "9", "task.options.train_seeds=8"], fly, "--first-seed=0, last seed 8: must be within the training seeds, 0"),
        (["task.options.id=NoSuch-v7"], fly, "task.options.id=NoSuch-v7: not registered; name its module: "),
        (["task.options.colour=red"], fly, "task.options.colour"),
        (["--first-seed", "5"], fly, "seed 5, step 2: returned 'fly' (no action); an action is \"walk\", \"rest\" or"),
        (["task.options.success_reward=9"], walk_and_rest, "--episodes=2: the demonstrator solved none of 2 episodes; "),
        ([f"task.options.id={MODULE}:Faulty-v0"], lambda env, observation: "nan_reward", "returned the reward nan; correct or wrap it"),
    ],
)  # fmt: skip
def test_mistakes_have_one_line(
    arguments: list[str], demonstrator: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left behind."""
    options = WALK if not any(word.startswith(("task=", "task.options.id=")) for word in arguments) else ()
    chosen = [] if any(word.startswith("task=") for word in arguments) else ["task=gymnasium"]
    episodes = [] if "--episodes" in arguments else ["--episodes", "2"]
    assert main(demonstrator, ["--out", str(tmp_path / "out"), *chosen, *options, *episodes, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and line in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fly, ["--out", str(tmp_path), "task=gymnasium", *WALK]) == 1
    assert capsys.readouterr().err == f"error: --out={tmp_path}: exists; choose another folder\n"


def test_errors_of_the_demonstrator_keep_their_traceback(tmp_path: Path) -> None:
    def fail(env: Any, observation: Any) -> int:
        return int("x")

    with pytest.raises(RuntimeError, match="the demonstrator failed at seed 0, step 0"):
        main(fail, ["--out", str(tmp_path / "out"), "task=gymnasium", *WALK])
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_user_is_a_command(tmp_path: Path) -> None:
    """The file in the docstring of the tool, with an environment of this package."""
    whole = (ROOT / "tools" / "data" / "make_gymnasium.py").read_text()
    text = whole.split("# my_solver.py\n")[1].split("\nThe settings")[0]
    (tmp_path / "my_solver.py").write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()) + "\n")
    given = ["--out", "made", "--episodes", "2", "--all", "task=gymnasium", "task.options.id=gym_cards/NumberLine-v0", "task.max_turns=3"]
    result = subprocess.run(
        [sys.executable, "my_solver.py", *given], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "of 2 episodes solved" in result.stdout and (tmp_path / "made" / "transcripts.jsonl").is_file()


@pytest.mark.skipif(find_spec("minigrid") is None, reason="minigrid is not installed")
def test_the_solver_of_the_example_is_optimal() -> None:
    """In MiniGrid-DoorKey, the solver of examples/gymnasium_environment.py needs as many steps as a
    shortest plan, which breadth-first search finds in MiniGrid itself.
    """
    from tests.support.minigrid_plans import plan_door_key

    solver = runpy.run_path(str(ROOT / "examples" / "gymnasium_environment.py"))["demonstrate"]
    settings = TaskSettings(name="gymnasium", options=GymnasiumOptions(id="MiniGrid-DoorKey-5x5-v0"), max_turns=50)
    player = DemonstrationPlayer(settings, solver)
    for seed in range(6):
        plan, reward = plan_door_key(seed=seed)
        episode = asyncio.run(player.play(seed))
        assert episode.is_solved and len(episode.turns) == len(plan) and episode.episode_return == pytest.approx(reward)
