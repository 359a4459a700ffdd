"""Any gymnasium environment that renders pictures as a task.

The policy receives the last frames and a prompt with the texts of the observation and the format of
an action. The reply is one JSON object, or thoughts and actions in tags (action_grammar.py). Every
turn is a new sequence.

An episode ends when the environment terminates (StopReason.DONE) or truncates it
(StopReason.ENV_TRUNCATED), or at a limit of the policy, such as task.max_turns. A reply without a
valid action is always recorded as a failed call (ToolCall.error); task.options.invalid determines
its effect.

Each episode has its own process. An environment that raises an exception, crashes or exceeds
task.options.step_timeout_s fails only its own episode.
"""

import base64
import hashlib
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from PIL import Image as Pillow

from megatron_rl.config import TaskSettings, require
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rewards.rubric import RewardFn, RewardInput, RewardTerm, Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.task import Env, Step, Task, require_options
from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction, find_action_start
from megatron_rl.tasks.gym_cards.game import INVALID_ACTION_REWARD, invalid_fraction
from megatron_rl.tasks.gymnasium_envs.action_grammar import Action, ActionGrammar
from megatron_rl.tasks.gymnasium_envs.environment_client import encode_spec, load_grammar, make_environment_pool
from megatron_rl.tasks.process_pool import EpisodeProcess, ProcessPool
from megatron_rl.types import Example, Message, Rollout, ToolCall

DEFAULT_PROMPTS = {
    "json": '{observation}\nAnswer with one JSON object: {"thoughts": text, "action": {actions}}',
    "tags": "{observation}\nAnswer with <think>thoughts</think><answer>action</answer>; an action is {actions}",
}
"""Maps each value of task.options.reply to the default of task.options.prompt."""
FIRST_EVAL_SEED = 1 << 30
"""Seed of the first evaluation example. Training seeds are smaller."""
SOLVED, NOT_SOLVED = "solved", "not solved"
"""Parts of Rollout.reason that state `success` of the info of the last step."""


def find_action(text: str, options: GymnasiumOptions) -> int | None:
    """Return the index of the character at which the action of a reply begins, or None."""
    if options.reply != "tags":
        return find_action_start(text)
    start = text.rfind("<answer>")
    return None if start == -1 else start


def solved_reward(options: GymnasiumOptions) -> RewardFn:
    """Return a reward function that returns 1 for solved episodes and 0 for all other episodes."""

    async def part(outcome: RewardInput) -> float:
        return float(is_solved(outcome.rollout, options))

    return part


def is_solved(rollout: Rollout, options: GymnasiumOptions) -> bool:
    """Return True if the episode is solved (task.options.success_reward).

    The return excludes the rewards and penalties for the format of replies, which the environment
    does not know.
    """
    earned = 0.0
    for turn in rollout.turns:
        is_valid = turn.tool_call is None or turn.tool_call.ran
        if is_valid and options.format_reward:
            earned += round(turn.reward - options.format_reward, 9)  # without the rounding error of adding it
        elif is_valid or options.invalid == "random":
            earned += turn.reward
    if options.success_reward is not None:
        return earned >= options.success_reward
    stated = {SOLVED, NOT_SOLVED} & {*rollout.reason.split(", ")}
    return SOLVED in stated if stated else earned > 0


class GymnasiumEnv(Env):
    """Environment of one episode, which runs in a process of its own."""

    def __init__(self, seed: int, *, process_pool: ProcessPool, options: GymnasiumOptions, grammar: ActionGrammar) -> None:
        self.seed, self.process_pool, self.options, self.grammar = seed, process_pool, options, grammar
        self.process: EpisodeProcess | None = None
        self.rng = random.Random()
        self.frames: list[Pillow.Image] = []
        self.actions: list[str] = []
        """Actions between the frames."""
        self.text = ""
        self.note = ""
        """Statement of the last step that the task is solved or not; empty without a statement."""

    async def reset(self, seed: int) -> list[Message]:
        """Start the episode of the example's seed and return the first observation.

        The argument `seed` determines only the random actions of task.options.invalid=random.
        """
        self.rng.seed(seed)
        self.process = await self.process_pool.acquire(encode_spec(self.options))
        self._store(await self._request(seed=self.seed, grammar=asdict(self.grammar)))
        return [self._make_message()]

    @property
    def state(self) -> str:
        """Digest of the current frame and text. States that look equal have the same name."""
        return hashlib.blake2b(self.frames[-1].tobytes() + self.text.encode(), digest_size=16).hexdigest()

    async def step(self, text: str) -> Step:
        """Apply the action in a reply, or the configured effect of an invalid reply."""
        return replace(await self._handle_reply(text), action_char=find_action(text, self.options))

    async def _handle_reply(self, text: str) -> Step:
        actions = self._parse(text)
        if not isinstance(actions, InvalidAction):
            step = await self._play_actions(actions, ToolCall(tool="move", source=self._format(actions)))
            return replace(step, reward=step.reward + self.options.format_reward)
        call = ToolCall(tool="move", source=text, error=str(actions), ran=False)
        if self.options.invalid == "random":
            return await self._play_actions([self.grammar.sample(self.rng)], call)
        reward = INVALID_ACTION_REWARD if self.options.invalid == "penalize" else 0.0
        return Step(messages=[self._make_message()], reward=reward, done=False, reason=self.note, tool_call=call, is_new_prompt=True)

    def _parse(self, text: str) -> list[Action] | InvalidAction:
        if self.options.reply == "tags":
            return self.grammar.parse_tags(text, max_actions=self.options.actions_per_turn)
        action = self.grammar.parse(text)
        return action if isinstance(action, InvalidAction) else [action]

    def _format(self, actions: Sequence[Action]) -> str:
        return ", ".join(map(self.grammar.format_action, actions))

    async def _play_actions(self, actions: Sequence[Action], call: ToolCall) -> Step:
        """Take the actions until the episode ends. Only the last frame is added to the history."""
        reward, num_taken, is_over, answer = 0.0, 0, False, {}
        while num_taken < len(actions) and not is_over:
            answer = await self._request(action=actions[num_taken])
            num_taken += 1
            reward += answer["reward"]
            is_over = answer["is_terminated"] or answer["is_truncated"]
        self.actions.append(self._format(actions[:num_taken]))
        self._store(answer)
        self.note = {None: "", True: SOLVED, False: NOT_SOLVED}[answer["is_solved"]]
        is_truncated = is_over and not answer["is_terminated"]
        flag = "" if not is_over else "truncated" if is_truncated else "terminated"
        reason = ", ".join(filter(None, (flag, self.note)))
        messages = [] if flag == "terminated" else [self._make_message()]
        return Step(
            messages=messages, reward=reward, done=is_over, reason=reason, is_truncated=is_truncated, tool_call=call, is_new_prompt=True
        )

    async def _request(self, **question: object) -> dict[str, Any]:
        assert self.process is not None, "step before reset"
        answer = await self.process.send_request(**question)
        if "refused" in answer:
            key, value, remedy = answer["refused"]
            raise PermanentInfraError(f"{key}={value}: seed {self.seed}, after {len(self.actions)} steps: {remedy}")
        return answer

    def _store(self, answer: dict[str, Any]) -> None:
        picture = Pillow.frombytes("RGB", tuple(answer["size"]), base64.b64decode(answer["rgb"]))
        self.frames = [*self.frames, picture][-self.options.history :]
        self.text = answer["text"]

    def _make_message(self) -> Message:
        """Return the user message with the last frames, the actions between them and the prompt."""
        known = {"{observation}": self.text, "{actions}": self.grammar.describe()}
        template = self.options.prompt or DEFAULT_PROMPTS[self.options.reply]
        prompt = re.sub(r"\{observation\}|\{actions\}", lambda found: known[found[0]], template).strip()
        texts = [*(f"Action: {action}" for action in self.actions[len(self.actions) - len(self.frames) + 1 :]), prompt]
        parts = [
            part
            for frame, text in zip(self.frames, texts, strict=True)
            for part in ({"type": "image", "image": frame}, {"type": "text", "text": text})
        ]
        return {"role": "user", "content": parts}

    async def close(self) -> None:
        """Close the environment and end its process."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            if process.is_idle:
                with suppress(InfraError):  # the episode is over, so a failure has no effect on it
                    await process.send_request(close=True)
        finally:
            self.process_pool.release(process)


class GymnasiumTask(Task):
    """Task of a gymnasium environment. Each example is a seed of the environment's reset."""

    Options = GymnasiumOptions
    appends_to_sequence = False

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options = require_options(settings, GymnasiumOptions)
        require(bool(options.id), "task.options.id", "", "is empty; choose an environment, e.g. task.options.id=MiniGrid-DoorKey-5x5-v0")
        self.options = options
        self.process_pool = make_environment_pool(options)
        self.rubric = Rubric(
            terms={"solved": RewardTerm(solved_reward(options), weight=0.0)},
            turn_terms={"return": TurnRewardTerm(environment_rewards, averages_turns=False)},
            solved_term="solved",
        )
        self._grammar = cache(lambda: load_grammar(options))

    async def close(self) -> None:
        """End all processes."""
        await self.process_pool.close()

    def examples(self, split: str) -> list[Example]:
        """Return one example for each seed of a split.

        Raises:
            ValueError: The environment cannot be run. It is created and reset once.
        """
        self._grammar()
        first, num = (0, self.options.train_seeds) if split == "train" else (FIRST_EVAL_SEED, self.options.eval_seeds)
        return [Example(id=f"seed{seed}", payload={"seed": seed}) for seed in range(first, first + num)]

    def env(self, example: Example) -> GymnasiumEnv:
        """Return a new environment for one seed."""
        return GymnasiumEnv(example.payload["seed"], process_pool=self.process_pool, options=self.options, grammar=self._grammar())

    def find_action(self, text: str) -> int | None:
        """Return the index of the last `<answer>` or `"action"` in a response."""
        return find_action(text, self.options)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the fraction of replies without a valid action, as the metric `invalid`."""
        return {"invalid": invalid_fraction(rollouts)}
