"""Questions that an agent answers in a process of its own, with the policy as its model.

The agent is any program that uses OpenAI's chat completions: the task sets OPENAI_BASE_URL and
OPENAI_API_KEY. Everything that the agent samples is trained on with the reward of its result, which
is the last line that it prints. The reward `accuracy` compares the result with the reference
answer. The reward `reported` reads it: {"reward": 0.5}. The reward `posted` is posted with a second
key. An episode that ends at a limit of the policy has no result, and the reward 0.
"""

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import TaskSettings, require
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rewards.accuracy import AccuracyReward
from megatron_rl.rewards.algebra import MathVerifier
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric
from megatron_rl.rollout.task import require_options
from megatron_rl.tasks.agent.agent_sandbox import check_paths, open_sandbox, resolve_program
from megatron_rl.tasks.agent.environment import ExternalAgentEnv
from megatron_rl.tasks.agent.launch import AgentLaunch
from megatron_rl.tasks.question_task import QuestionTask
from megatron_rl.types import ACCURACY_TERM, Example, StopReason

if TYPE_CHECKING:
    from megatron_rl.tasks.agent.chat_server import ChatServer


def get_result(outcome: RewardInput) -> str:
    """Return the last line that the agent printed; empty if it did not end by itself."""
    call = outcome.turns[-1].tool_call if outcome.turns else None
    return "" if call is None else call.text


def read_result(result: str) -> str | None:
    """Return the agent's answer: the whole line, or None if it is empty."""
    return result or None


async def reported_reward(outcome: RewardInput) -> float:
    """Return the reward that the agent reports as its result, or that was posted.

    Raises:
        PermanentInfraError: The result is not a JSON object with a finite reward.
    """
    result = get_result(outcome)
    if outcome.stop_reason is not StopReason.DONE:
        return 0.0
    try:
        reported = json.loads(result)
    except (ValueError, RecursionError):
        reported = None
    reward = reported.get("reward") if isinstance(reported, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        remedy = 'the last line must be a JSON object such as {"reward": 0.5}'
        raise PermanentInfraError(f"task.reward=reported: the agent printed {result[:100]!r}; {remedy}")
    return float(reward)


def _check_launch(options: AgentOptions) -> None:
    """Raise ValueError unless the options name an agent that can be started."""
    if options.url:
        require(not options.command, "task.options.url", options.url, "and task.options.command are set; remove one of them")
        return
    remedy = "is empty; name the agent's program, e.g. 'task.options.command=[python,/home/me/my_agent.py]'"
    require(bool(options.command), "task.options.command", options.command, remedy)
    program = shutil.which(options.command[0])
    require(program is not None, "task.options.command", options.command[0], "is not an executable program in PATH")


def _check_sandbox(options: AgentOptions, settings: TaskSettings) -> None:
    """Raise ValueError unless the command can run in the sandbox, without the answers."""
    remedy = "needs a key that the command does not receive in the sandbox; use accuracy or reported"
    require(settings.reward != "posted", "task.reward", settings.reward, remedy)
    for path in options.sandbox_paths:
        require(Path(path).exists(), "task.options.sandbox_paths", path, "does not exist on this machine")
    data = settings.data
    program = resolve_program(shutil.which(options.command[0]) or "")
    check_paths([program, *options.command[1:]], options.sandbox_paths, hidden=[*data.train, *data.eval, *data.demonstrations])


class AgentTask(QuestionTask):
    """Task with questions from the user's files and the user's agent."""

    Options = AgentOptions
    reward_names = ("accuracy", "reported", "posted")

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        require(bool(settings.data.eval), "task.data.eval", settings.data.eval, "set the files that contain the held-out questions")
        self.options = require_options(settings, AgentOptions)
        _check_launch(self.options)
        if self.options.sandbox:
            _check_sandbox(self.options, settings)
        if settings.reward in ("reported", "posted"):
            self.judge = None
            self.rubric = Rubric(terms={settings.reward: RewardTerm(reported_reward)})
        else:
            accuracy = AccuracyReward(read_result, MathVerifier(), self.judge, get_result)
            self.rubric = Rubric(terms={ACCURACY_TERM: RewardTerm(accuracy)}, solved_term=ACCURACY_TERM)
        self.server: ChatServer | None = None
        self.slots = asyncio.Semaphore(self.options.processes)
        self.launch = AgentLaunch(
            self.options.command,
            self.options.url,
            posts_reward=settings.reward == "posted",
            trains_abandoned=self.options.train_abandoned,
        )

    async def start(self) -> None:
        """Start the server, and the judge if one is configured.

        Raises:
            InfraError: The command should run in the sandbox, but this host offers none.
        """
        from megatron_rl.tasks.agent.chat_server import ChatServer  # imports fastapi

        if self.options.sandbox:
            sandbox = await asyncio.to_thread(open_sandbox, self.options.sandbox_paths)
            program = resolve_program(shutil.which(self.options.command[0]) or "")
            self.launch = replace(self.launch, sandbox=sandbox, command=[program, *self.options.command[1:]])
        self.server = ChatServer(host=self.options.host, ignored=self.options.ignore)
        await self.server.start()
        await super().start()

    async def close(self) -> None:
        """Stop the server and the judge."""
        if self.server is not None:
            await self.server.close()
        await super().close()

    def env(self, example: Example) -> ExternalAgentEnv:
        """Return a new environment for one question."""
        return ExternalAgentEnv(example, launch=self.launch, server=self.server, slots=self.slots)
