"""ALFWorld as a task: episodes, RL4VLM's rewards, and demonstrations for the SFT stage.

The policy receives an image of TextWorld's observation text, and a prompt with the task and the
admissible commands. The reply is one JSON object (scene_prompts.py). As in RL4VLM, the prompt
contains only the current state, so every turn is a new sequence.

The reward of a step is computed as in RL4VLM's code. It is the sum of three terms: 50 if the game
is won, the fraction of the goal's conditions that are met, and -1 if the reply contains no
admissible command. The fraction is added at every step, so waiting in a state with half of the
conditions met earns 0.5 per step. With task.options.progress=change, the second term is the change
in this fraction instead of the fraction itself.

A reply without an admissible command is always recorded as a failed call (ToolCall.error). The
setting task.options.invalid determines the reward and the next state after such a reply, as in the
card games (gym_cards/game.py).
"""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.config.task_options import AlfworldOptions
from megatron_rl.rewards.rubric import RewardFn, RewardInput, RewardTerm, Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.task import Env, Step, Task, require_options
from megatron_rl.tasks.alfworld.action_parser import ACTION_PARSERS, InvalidAction
from megatron_rl.tasks.alfworld.game_files import (
    MAKE_COMMAND,
    TRANSCRIPT_FILES,
    find_game_folders,
    find_games,
    load_transcript,
    make_example,
    require_packages,
)  # fmt: skip
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND
from megatron_rl.tasks.alfworld.player_pool import make_player_pool
from megatron_rl.tasks.alfworld.scene_image import SceneRenderer, draw_blank, draw_text
from megatron_rl.tasks.alfworld.scene_prompts import GameObservation, write_prompt, write_reply, write_thoughts
from megatron_rl.tasks.gym_cards.card_action_parser import find_action_start
from megatron_rl.tasks.gym_cards.game import INVALID_ACTION_REWARD, LazyTranscripts, make_user_message
from megatron_rl.tasks.process_pool import EpisodeProcess, ProcessPool
from megatron_rl.types import Example, Message, ToolCall

MAX_STEPS = 50
WON_REASON = "won"
WIN_REWARD = 50.0
DEMONSTRATORS = {"correct": "planner", "searching": "searcher", "biased": "searcher"}
"""Maps each demonstration split to its demonstrator."""
MISTAKE_PROBABILITY = 0.3
"""Probability that a demonstration of the "biased" split contains a random admissible command
instead of the demonstrator's command.
"""
DemonstrationPlan = tuple[Path, str, int, str | None]
"""(game folder, demonstrator, zero-based turn index, replacement command). The replacement command
is a random command that replaces the demonstrator's command. If the replacement command is None,
the demonstrator's command is used.
"""


def won_reward(kind: str | None) -> RewardFn:
    """Return a reward function that returns 1 for won games and 0 for all other games.

    If `kind` is given, the reward function returns None for games of any other kind.
    """

    async def part(outcome: RewardInput) -> float | None:
        return float(outcome.rollout.reason == WON_REASON) if kind in (None, outcome.payload["kind"]) else None

    return part


ALFWORLD_RUBRIC = Rubric(
    terms={
        "won": RewardTerm(won_reward(None), weight=0.0),
        **{f"won_{kind}": RewardTerm(won_reward(kind), weight=0.0) for kind in ALFWORLD_NAME_BY_KIND},
    },
    turn_terms={"return": TurnRewardTerm(environment_rewards, averages_turns=False)},
    solved_term="won",
)
"""Rubric that uses the return of an episode as its reward. The terms `won` and `won_KIND` have
weight 0. These two terms report the success rate over all games and for each kind of game.
"""


class AlfworldEnv(Env):
    """Environment for one episode of a game."""

    def __init__(self, game: str, *, player_pool: ProcessPool, options: AlfworldOptions, render: SceneRenderer = draw_text) -> None:
        self.game, self.player_pool, self.options, self.render = game, player_pool, options, render
        self.player: EpisodeProcess | None = None
        self.commands: list[str] = []
        self.rng = random.Random()

    async def reset(self, seed: int) -> list[Message]:
        """Start the game in a player process and return the first observation."""
        self.rng.seed(seed)
        self.player = await self.player_pool.acquire(self.game)
        answer = await self.player.send_request(game=self.game)
        self.task = str(answer.pop("task"))
        self.observation = GameObservation(**answer)
        return [self._make_message()]

    @property
    def state(self) -> str:
        """Commands of the episode so far, one per line.

        The commands determine the complete state. The current observation does not identify the
        state, because an observation covers only a part of the scene.
        """
        return "\n".join(self.commands)

    async def step(self, text: str) -> Step:
        """Run the command in a reply, or apply the configured effect of an invalid reply."""
        return replace(await self._handle_reply(text), action_char=find_action_start(text))

    async def _handle_reply(self, text: str) -> Step:
        commands = self.observation.commands
        read = ACTION_PARSERS[self.options.reading](text, commands)
        if not isinstance(read, InvalidAction):
            return await self._play_command(commands[read], ToolCall(tool="move", source=commands[read]))
        call = ToolCall(tool="move", source=text, error=str(read), ran=False)
        if self.options.invalid == "random":
            return await self._play_command(self.rng.choice(commands), call)
        reward = self._progress_reward(self.observation) + (INVALID_ACTION_REWARD if self.options.invalid == "penalize" else 0.0)
        return Step(messages=[self._make_message()], reward=reward, done=False, tool_call=call, is_new_prompt=True)

    async def _play_command(self, command: str, call: ToolCall) -> Step:
        assert self.player is not None, "step before reset"
        view = GameObservation(**await self.player.send_request(command=command))
        reward = WIN_REWARD * view.is_won + self._progress_reward(view)
        self.observation = view
        self.commands.append(command)
        if view.is_won:
            return Step(messages=[], reward=reward, done=True, reason=WON_REASON, tool_call=call)
        return Step(messages=[self._make_message()], reward=reward, done=False, tool_call=call, is_new_prompt=True)

    def _progress_reward(self, observation: GameObservation) -> float:
        """Return the part of the step's reward that depends on the goal's conditions.

        The argument `observation` is the observation after the step. The attribute
        `self.observation` is the observation before the step.
        """
        before = self.observation.num_met if self.options.progress == "change" else 0
        return (observation.num_met - before) / observation.num_conditions

    def _make_message(self) -> Message:
        before = self.commands[-self.options.history :] if self.options.history else []
        prompt = write_prompt(self.task, self.observation, history=before, has_text=self.options.observation == "both")
        return make_user_message(self.render(self.observation.text), prompt)

    async def close(self) -> None:
        """Return the player process to the pool."""
        if self.player is not None:
            self.player_pool.release(self.player)
            self.player = None


class AlfworldTask(Task):
    """ALFWorld task. An episode succeeds if the game is won.

    The train and eval splits have separate game folders. In both official and generated games, the
    two splits use different scenes.
    """

    demonstration_splits = tuple(DEMONSTRATORS)
    Options = AlfworldOptions
    appends_to_sequence = False
    rubric = ALFWORLD_RUBRIC

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options = self.options = require_options(settings, AlfworldOptions)
        for key, turns in (("task.max_turns", settings.max_turns), ("task.eval_max_turns", settings.eval_max_turns)):
            require(turns <= MAX_STEPS, key, turns, f"must be at most {MAX_STEPS} (steps per episode)")
        self.player_pool = make_player_pool(options.processes, timeout_s=options.call_s)
        self._games = cache(self._find_games)

    async def close(self) -> None:
        """End all player processes."""
        await self.player_pool.close()

    def examples(self, split: str) -> list[Example]:
        """Return the games of a split.

        Raises:
            ValueError: There are no games, or a required package is not installed.
        """
        games = self._games(split)
        if split == "train":
            return [make_example(folder, picture="drawn") for folder in games]
        return [make_example(folder, picture=self.options.eval_picture) for folder in games[: self.settings.data.max_eval or None]]

    def _find_games(self, split: str) -> list[Path]:
        require_packages()
        return find_games(find_game_folders(self.settings.data, split), config_key=f"task.data.{split}")

    def env(self, example: Example) -> AlfworldEnv:
        """Return a new environment for one game."""
        look = draw_text if example.payload["picture"] == "drawn" else draw_blank
        return AlfworldEnv(str(example.payload["game"]), player_pool=self.player_pool, options=self.options, render=look)

    def demonstrations(self, split: str, *, num: int, seed: int) -> LazyTranscripts[DemonstrationPlan]:
        """Return single-turn demonstrations from won games of the train split.

        A larger `num` with the same seed returns the same demonstrations, followed by additional
        ones. The demonstrator of the "correct" split is the planner, which knows the complete
        state. The demonstrator of the "searching" and "biased" splits uses only its observations
        (search_expert.py). In the "biased" split, the demonstrator's command is replaced by a
        random admissible command with probability MISTAKE_PROBABILITY.
        """
        require_choice("sft.splits", split, self.demonstration_splits)
        player, dice = DEMONSTRATORS[split], random.Random(seed)
        games = [folder for folder in self._games("train") if (folder / TRANSCRIPT_FILES[player]).is_file()]
        command = f"{MAKE_COMMAND.partition(' --')[0]} --transcribe FOLDER"
        remedy = f"contains no {TRANSCRIPT_FILES[player]} files, which demonstrations require; create them with `{command}`"
        require(bool(games), "task.data.train", ", ".join(self.settings.data.train), remedy)
        dice.shuffle(games)
        plans: list[DemonstrationPlan] = []
        for number in range(num):
            folder = games[number % len(games)]
            turns = load_transcript(folder, player).turns
            turn = dice.randrange(len(turns))
            mistake, errs = dice.choice(turns[turn].commands), dice.random() < MISTAKE_PROBABILITY
            plans.append((folder, player, turn, mistake if errs and split == "biased" else None))
        return LazyTranscripts(plans, self._write_transcript)

    def _write_transcript(self, plan: DemonstrationPlan) -> list[Message]:
        folder, player, number, mistake = plan
        transcript = load_transcript(folder, player)
        turn = transcript.turns[number]
        before = transcript.commands[max(0, number - self.options.history) : number]
        view = GameObservation(turn.text, turn.commands, is_won=False, num_met=0, num_conditions=1)
        prompt = write_prompt(transcript.task, view, history=before, has_text=self.options.observation == "both")
        said = write_reply(turn.thoughts, turn.command) if mistake is None else write_reply(write_thoughts([mistake]), mistake)
        return [make_user_message(draw_text(turn.text), prompt), {"role": "assistant", "content": [{"type": "text", "text": said}]}]

    def find_action(self, text: str) -> int | None:
        """Return the index of the last `"action"` in a response."""
        return find_action_start(text)

    def gold_replies(self, example: Example) -> list[str]:
        """Return the planner's winning replies, one per turn.

        The list is empty if no transcript of the planner exists for the game.
        """
        folder = Path(str(example.payload["game"])).parent
        if not (folder / TRANSCRIPT_FILES["planner"]).is_file():
            return []
        return [write_reply(turn.thoughts, turn.command) for turn in load_transcript(folder).turns]
