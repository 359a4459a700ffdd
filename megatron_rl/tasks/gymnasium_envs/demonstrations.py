"""Demonstrations of task=gymnasium, played by a function of the user or by a solver.

A demonstrator is a function of the environment and its last observation that returns an action:

    def demonstrate(env, observation):
        return "forward"                                            # name or number of an action
        return {"thoughts": "The goal is ahead.", "action": "forward"}     # with thoughts

The environment is the one that gymnasium.make returned, so a solver can read its whole state
(`env.unwrapped`). The function must not step or reset it.

Episodes are played by GymnasiumEnv, so the prompts and pictures of the demonstrations are those of
training. Everything runs in one process.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from megatron_rl.config import TaskSettings, require
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.task import require_options
from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction
from megatron_rl.tasks.gymnasium_envs.action_grammar import Action, ActionGrammar
from megatron_rl.tasks.gymnasium_envs.environment_client import load_grammar
from megatron_rl.tasks.gymnasium_envs.episode import Episode, EpisodeSpec, Refused
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumEnv, is_solved
from megatron_rl.tasks.process_pool import ProcessPool
from megatron_rl.types import Message, Rollout, Turn

Demonstrator = Callable[[Any, Any], Any]
"""Function of (environment, observation) that returns an action, or the fields of a reply."""


@dataclass(slots=True)
class PlayedEpisode:
    """Prompts and replies of one episode."""

    seed: int
    turns: list[tuple[list[Message], str]] = field(default_factory=list)
    """Pairs of a prompt and the demonstrator's reply to it."""
    episode_return: float = 0.0
    is_solved: bool = False


class InProcessEpisode:
    """Environment in this process, with the requests of an EpisodeProcess."""

    is_idle = True

    def __init__(self, spec: EpisodeSpec) -> None:
        self.episode = Episode(spec)

    async def send_request(self, **question: Any) -> dict[str, Any]:
        """Reset, step or close the environment."""
        try:
            if "close" in question:
                self.episode.env.close()
                return {}
            if "seed" in question:
                return self.episode.reset(question["seed"], grammar=question["grammar"])
            return self.episode.step(question["action"])
        except Refused as refused:
            return {"refused": [str(part) for part in refused.args]}


class InProcessPool:
    """Creates environments in this process, with the methods of a ProcessPool."""

    def __init__(self) -> None:
        self.current: InProcessEpisode | None = None

    async def acquire(self, spec: str) -> InProcessEpisode:
        """Return a new environment."""
        self.current = InProcessEpisode(EpisodeSpec(**json.loads(spec)))
        return self.current

    def release(self, process: InProcessEpisode) -> None:
        """Forget the environment, which is closed."""
        self.current = None


def write_reply(chosen: Any, grammar: ActionGrammar, *, form: str = "json") -> str:
    """Return the reply for a demonstrator's action.

    Args:
        chosen: A name, a number, a list or an array of numbers, or a mapping with the action as
            the value of "action" and optional other fields, such as "thoughts".
        grammar: Actions of the environment.
        form: Format of the reply (task.options.reply). The format tags has only "thoughts" and
            one action.

    Raises:
        ValueError: The action is not an action of the environment.
    """
    fields = dict(chosen) if isinstance(chosen, Mapping) else {"action": chosen}
    if "action" in fields:
        fields["action"] = _to_json_action(fields.pop("action"), grammar)
    if form == "tags":
        reply = f"<think>{fields.get('thoughts', '')}</think><answer>{fields.get('action', '')}</answer>"
        read = grammar.parse_tags(reply, max_actions=1)
    else:
        try:
            reply = json.dumps(fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"returned {fields}, which cannot be written as JSON: {error}") from error
        read = grammar.parse(reply)
    if isinstance(read, InvalidAction):
        raise ValueError(f"returned {chosen!r} ({read}); an action is {grammar.describe()}")
    return reply


def _to_json_action(action: Any, grammar: ActionGrammar) -> Any:
    """Return an action as it is written in a reply: with its name, and as Python numbers."""
    if isinstance(action, np.ndarray | np.generic):
        action = np.ravel(action).tolist() if grammar.is_list else np.asarray(action).item() if np.size(action) == 1 else action.tolist()
    if isinstance(action, tuple):
        action = list(action)
    is_number = isinstance(action, int) and not isinstance(action, bool)
    if grammar.names and is_number and grammar.low[0] <= action <= grammar.high[0]:
        return grammar.format_action([int(action)])
    return action


class DemonstrationPlayer:
    """Plays episodes of task=gymnasium with a demonstrator.

    A fraction `random_fraction` of the actions is replaced by random actions, so that the
    demonstrations also have states off the demonstrator's path. The replies are always those of the
    demonstrator. The random actions of an episode depend only on its seed.
    """

    def __init__(self, settings: TaskSettings, demonstrator: Demonstrator, *, random_fraction: float = 0.0) -> None:
        self.options = require_options(settings, GymnasiumOptions)
        self.max_turns, self.demonstrator, self.random_fraction = settings.max_turns, demonstrator, random_fraction
        require(0 <= random_fraction < 1, "--random", random_fraction, "must be at least 0 and below 1")
        self.grammar = load_grammar(self.options)

    async def play(self, seed: int) -> PlayedEpisode:
        """Play the episode of a seed.

        Raises:
            ValueError: The environment failed, or the demonstrator returned something else than an
                action. The message names the seed and the step.
            RuntimeError: The demonstrator raised a ValueError or an OSError.
        """
        pool, dice = InProcessPool(), random.Random(seed)
        env = GymnasiumEnv(seed, process_pool=cast(ProcessPool, pool), options=self.options, grammar=self.grammar)
        rollout, played = Rollout(task="gymnasium", example_id=f"seed{seed}", group=0, sample_index=0), PlayedEpisode(seed)
        try:
            messages = await env.reset(seed)
            while len(rollout.turns) < self.max_turns:
                reply = self._ask(pool, seed=seed, step=len(rollout.turns))
                played.turns.append((messages, reply))
                step = await env.step(self._random_reply(dice) if dice.random() < self.random_fraction else reply)
                assert step.tool_call is not None and step.tool_call.ran, f"the task rejects the reply {reply!r}"
                rollout.turns.append(Turn(sequence=0, token_span=(0, 1), text=reply, reward=step.reward, tool_call=step.tool_call))
                rollout.reason, messages = step.reason, step.messages
                if step.done:
                    break
        except PermanentInfraError as error:
            raise ValueError(str(error)) from error
        finally:
            await env.close()
        played.episode_return = sum(turn.reward for turn in rollout.turns)
        played.is_solved = is_solved(rollout, self.options)
        return played

    def _ask(self, pool: InProcessPool, *, seed: int, step: int) -> str:
        """Return the demonstrator's reply. Its exceptions are not reported as wrong settings."""
        assert pool.current is not None, "ask before reset"
        try:
            chosen = self.demonstrator(pool.current.episode.env, pool.current.episode.observation)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"the demonstrator failed at seed {seed}, step {step}") from error
        try:
            return write_reply(chosen, self.grammar, form=self.options.reply)
        except ValueError as error:
            raise ValueError(f"the demonstrator, seed {seed}, step {step}: {error}") from error

    def _random_reply(self, dice: random.Random) -> str:
        action: Action = self.grammar.sample(dice)
        return write_reply(action if self.grammar.is_list else action[0], self.grammar, form=self.options.reply)
