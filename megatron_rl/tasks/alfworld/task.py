"""ALFWorld as a task: an episode of a game, RL4VLM's rewards, and the demonstrations of the warm start.

The policy sees a picture of what TextWorld says, the task and the admissible commands, and replies with one JSON object
(scene_prompts.py). RL4VLM prompts with the present state alone, and so does this: every turn is a new context.

A step pays 50 if the game is won, the share of the goal's conditions that hold, and -1 where the reply was no admissible command: what
RL4VLM's code pays. The share is paid anew at every step, so that to dally in a state half done pays 0.5 a step; with
task.options.progress=change a step pays what it changed of it. A reply without a command is always counted (ToolCall.error), and
task.options.invalid says what it does, as in the card games (gym_cards/game.py).
"""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.rewards.rubric import Outcome, Part, Reward, Rubric, TurnPart, environment_rewards
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.tasks.alfworld.action_parser import READINGS, Invalid
from megatron_rl.tasks.alfworld.game_files import (
    MAKE,
    TRANSCRIPTS,
    example_of,
    folders_of,
    games_of,
    require_packages,
    transcript_of,
)  # fmt: skip
from megatron_rl.tasks.alfworld.goals import NAMES
from megatron_rl.tasks.alfworld.player_pool import Player, Players
from megatron_rl.tasks.alfworld.scene_image import Look, blank, drawn
from megatron_rl.tasks.alfworld.scene_prompts import View, prompt_of, thoughts_before, write_reply
from megatron_rl.tasks.gym_cards.action_parser import action_at
from megatron_rl.tasks.gym_cards.game import PENALTY, Transcripts, asked
from megatron_rl.tasks.task_options import AlfworldOptions
from megatron_rl.types import Example, Message, ToolCall

MAX_STEPS = 50
WON = "won"
WIN = 50.0
DEMONSTRATORS = {"correct": "planner", "searching": "searcher", "biased": "searcher"}
"""Who plays in a split of demonstrations."""
MISTAKES = 0.3
"""How often the demonstrator of split "biased" gives any admissible command instead of the right one."""
Plan = tuple[Path, str, int, str | None]
"""A demonstration: the game's folder, who plays it, the turn, and the mistake that is made there."""


def won(kind: str | None) -> Reward:
    """1 where an episode was won, else 0; no opinion on games of other kinds."""

    async def part(outcome: Outcome) -> float | None:
        return float(outcome.rollout.reason == WON) if kind in (None, outcome.payload["kind"]) else None

    return part


RUBRIC = Rubric(
    parts={"won": Part(won(None), weight=0.0), **{f"won_{kind}": Part(won(kind), weight=0.0) for kind in NAMES}},
    turn_parts={"return": TurnPart(environment_rewards, mean=False)},
    solved_by="won",
)
"""The return is what is learned from; who won, by the kind of game, is told."""


class AlfworldEnv(Env):
    """One episode of one game."""

    def __init__(self, game: str, *, players: Players, options: AlfworldOptions, look: Look = drawn) -> None:
        self.game, self.players, self.options, self.look = game, players, options, look
        self.player: Player | None = None
        self.played: list[str] = []
        self.dice = random.Random()

    async def reset(self, seed: int) -> list[Message]:
        self.dice.seed(seed)
        self.player = await self.players.take(self.game)
        answer = await self.player.ask(game=self.game)
        self.task = str(answer.pop("task"))
        self.view = View(**answer)
        return [self._shown()]

    @property
    def state(self) -> str:
        """What was done so far: where things are follows from it, and nothing else does in a house that is seen in part."""
        return "\n".join(self.played)

    async def step(self, text: str) -> Step:
        return replace(await self._answer(text), action_at=action_at(text))

    async def _answer(self, text: str) -> Step:
        commands = self.view.commands
        read = READINGS[self.options.reading](text, commands)
        if not isinstance(read, Invalid):
            return await self._play(commands[read], ToolCall(tool="move", source=commands[read]))
        call = ToolCall(tool="move", source=text, error=str(read), ran=False)
        if self.options.invalid == "random":
            return await self._play(self.dice.choice(commands), call)
        reward = self._progress(self.view) + (PENALTY if self.options.invalid == "penalize" else 0.0)
        return Step(messages=[self._shown()], reward=reward, done=False, call=call, new_context=True)

    async def _play(self, command: str, call: ToolCall) -> Step:
        assert self.player is not None, "step before reset"
        view = View(**await self.player.ask(command=command))
        reward = WIN * view.won + self._progress(view)
        self.view = view
        self.played.append(command)
        if view.won:
            return Step(messages=[], reward=reward, done=True, reason=WON, call=call)
        return Step(messages=[self._shown()], reward=reward, done=False, call=call, new_context=True)

    def _progress(self, view: View) -> float:
        """What is paid for the goal's conditions after a step that led from self.view to this one."""
        before = self.view.met if self.options.progress == "change" else 0
        return (view.met - before) / view.conditions

    def _shown(self) -> Message:
        before = self.played[-self.options.history :] if self.options.history else []
        prompt = prompt_of(self.task, self.view, before=before, has_text=self.options.observation == "both")
        return asked(self.look(self.view.text), prompt)

    async def close(self) -> None:
        if self.player is not None:
            self.players.give_back(self.player)
            self.player = None


class AlfworldTask(Task):
    """Games of split train and of split eval lie in different folders, and play in different scenes. An episode succeeds when it is won."""

    Options = AlfworldOptions
    continues_contexts = False
    rubric = RUBRIC

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options = AlfworldOptions() if settings.options is None else settings.options
        require(isinstance(options, AlfworldOptions), "task.options", options, "are not those of this task; choose task=alfworld")
        self.options: Any = options
        for key, turns in (("task.max_turns", settings.max_turns), ("task.eval_max_turns", settings.eval_max_turns)):
            require(turns <= MAX_STEPS, key, turns, f"an episode has {MAX_STEPS} steps, use no more")
        self.players = Players(options.processes, seconds=options.call_s)
        self._games = cache(self._found)

    async def close(self) -> None:
        await self.players.close()

    def examples(self, split: str) -> list[Example]:
        """ValueError: there are no games, or nothing to play them with."""
        games = self._games(split)
        if split == "train":
            return [example_of(folder, picture="drawn") for folder in games]
        return [example_of(folder, picture=self.options.eval_picture) for folder in games[: self.settings.data.max_eval or None]]

    def _found(self, split: str) -> list[Path]:
        require_packages()
        return games_of(folders_of(self.settings.data, split), key=f"task.data.{split}")

    def env(self, example: Example) -> AlfworldEnv:
        look = drawn if example.payload["picture"] == "drawn" else blank
        return AlfworldEnv(str(example.payload["game"]), players=self.players, options=self.options, look=look)

    def demonstrations(self, split: str, *, num: int, seed: int) -> Transcripts[Plan]:
        """Single turns of games of split train, which are won. Fewer are a prefix of more.

        In split "correct" the planner plays, who knows where things are; in "searching" one who knows what was seen (search_expert.py); in
        "biased" the same one, who gives any admissible command in MISTAKES of the turns.
        """
        require_choice("sft.splits", split, tuple(DEMONSTRATORS))
        player, dice = DEMONSTRATORS[split], random.Random(seed)
        games = [folder for folder in self._games("train") if (folder / TRANSCRIPTS[player]).is_file()]
        remedy = f"no game has a {TRANSCRIPTS[player]} to learn from; write them with `{MAKE.partition(' --')[0]} --transcribe FOLDER`"
        require(bool(games), "task.data.train", ", ".join(self.settings.data.train), remedy)
        dice.shuffle(games)
        plans: list[Plan] = []
        for number in range(num):
            folder = games[number % len(games)]
            turns = transcript_of(folder, player).turns
            turn = dice.randrange(len(turns))
            mistake, errs = dice.choice(turns[turn].commands), dice.random() < MISTAKES
            plans.append((folder, player, turn, mistake if errs and split == "biased" else None))
        return Transcripts(plans, self._transcript)

    def _transcript(self, plan: Plan) -> list[Message]:
        folder, player, number, mistake = plan
        transcript = transcript_of(folder, player)
        turn = transcript.turns[number]
        before = transcript.played[max(0, number - self.options.history) : number]
        view = View(turn.text, turn.commands, won=False, met=0, conditions=1)
        prompt = prompt_of(transcript.task, view, before=before, has_text=self.options.observation == "both")
        said = write_reply(turn.thoughts, turn.command) if mistake is None else write_reply(thoughts_before([mistake]), mistake)
        return [asked(drawn(turn.text), prompt), {"role": "assistant", "content": [{"type": "text", "text": said}]}]

    def gold(self, example: Example) -> list[str]:
        """Replies that win, turn by turn; none where no transcript lies beside the game."""
        folder = Path(str(example.payload["game"])).parent
        if not (folder / TRANSCRIPTS["planner"]).is_file():
            return []
        return [write_reply(turn.thoughts, turn.command) for turn in transcript_of(folder).turns]
