"""Environment of one episode, in which an agent requests the responses of the policy.

The agent's first request is the prompt of the episode, and every later request is an observation.
Requests that arrive at the same time are answered one after the other. The episode ends when the
agent's process exits.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rollout.engine import ResponseSize
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.agent.agent_process import AgentProcess
from megatron_rl.tasks.agent.chat_request import ChatRequest, ChatResponse, RequestError
from megatron_rl.tasks.agent.session import Continuation, SessionTree
from megatron_rl.types import Example, Message, ToolCall

if TYPE_CHECKING:  # imports fastapi
    from megatron_rl.tasks.agent.chat_server import ChatServer

EXAMPLE_FILE = "example.json"
"""File in the agent's folder: a JSON object with the fields id, question, system (the question's
system message, or an empty string) and images (paths of PNG files, in order).
"""
MAX_ANSWER_CHARS = 4000
ENDED = RequestError("the episode has ended: the policy has reached a limit of the run", code="episode_ended", status=403)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Request of the agent that waits for the policy's response."""

    asked: ChatRequest
    response: asyncio.Future[ChatResponse]


@dataclass(slots=True)
class RequestCounts:
    """Number of requests by how they were continued."""

    continued: int = 0
    branched: int = 0
    new_prompts: int = 0
    repeated: int = 0
    replaced: set[str] = field(default_factory=set)
    """Settings of requests that were replaced by those of the run."""

    def describe(self) -> str:
        """Return the counts above 0 in one line."""
        counts = {"continued": self.continued, "branched": self.branched, "new prompts": self.new_prompts, "repeated": self.repeated}
        words = [f"{number} {name}" for name, number in counts.items() if number]
        return ", ".join([*words, *([f"replaced {' '.join(sorted(self.replaced))}"] if self.replaced else [])])


class ExternalAgentEnv(Env):
    """Environment of one episode."""

    def __init__(self, example: Example, *, command: Sequence[str], server: "ChatServer | None", slots: asyncio.Semaphore) -> None:
        """Create the environment.

        Args:
            example: Question.
            command: Program and arguments of the agent.
            server: Running server; None before the task has started, when no agent can run.
            slots: Limits the number of agents that run at the same time.
        """
        self.example, self.command, self.server, self.slots = example, command, server, slots
        self.counts = RequestCounts()
        self._tree = SessionTree()
        self._events: asyncio.Queue[PendingRequest | int] = asyncio.Queue()
        """Requests, and the exit code of the agent."""
        self._pending: PendingRequest | None = None
        """Request that the policy is responding to."""
        self._waiting: dict[tuple[str, ...], PendingRequest] = {}
        """Requests without a response, by their messages."""
        self._answered: dict[tuple[str, tuple[str, ...]], ChatResponse] = {}
        """Responses by idempotency key and messages."""
        self._size: ResponseSize | None = None
        self._key = ""
        self._process: AgentProcess | None = None
        self._exit: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._has_slot = self._is_closed = False

    async def reset(self, seed: int) -> list[Message]:
        """Start the agent and return the messages of its first request.

        Raises:
            PermanentInfraError: The agent cannot be started, or exits without a request.
        """
        if self.server is None:
            raise PermanentInfraError("the server of task=agent is not started")
        await self.slots.acquire()
        self._has_slot = True
        self._folder = Path(await asyncio.to_thread(write_folder, self.example))
        self._key = self.server.open_episode(self.ask)
        environment = {"OPENAI_BASE_URL": self.server.base_url, "OPENAI_API_KEY": self._key, "MEGATRON_RL_SEED": str(seed)}
        self._process = await AgentProcess.start(fill_command(self.command, self.example), folder=self._folder, environment=environment)
        self._exit = asyncio.create_task(self._watch(self._process))
        event = await self._events.get()
        if isinstance(event, int):
            raise PermanentInfraError(f"{self._describe_exit(event)} before its first request to OPENAI_BASE_URL")
        self._pending = event
        return event.asked.messages

    async def ask(self, asked: ChatRequest, idempotency_key: str) -> ChatResponse:
        """Return the policy's response to a request.

        A request with the messages of one that still waits shares its response. So does a request
        with the messages and the idempotency key of an earlier one.

        Raises:
            RequestError: The episode has ended.
        """
        messages = tuple(asked.keys)
        known = self._answered.get((idempotency_key, messages)) if idempotency_key else None
        if known is not None:
            self.counts.repeated += 1
            return known
        if self._is_closed:
            raise ENDED
        request = self._waiting.get(messages)
        if request is not None:
            self.counts.repeated += 1
        else:
            request = self._waiting[messages] = PendingRequest(asked, asyncio.get_running_loop().create_future())
            self.counts.replaced |= {*asked.replaced}
            self._events.put_nowait(request)
        response = await asyncio.shield(request.response)  # a client that disconnects does not cancel the turn
        if idempotency_key:
            self._answered[idempotency_key, messages] = response
        return response

    def note_response_size(self, size: ResponseSize) -> None:
        """Keep the numbers of tokens for the response to the agent."""
        self._size = size

    async def step(self, text: str) -> Step:
        """Send the response to the agent and wait for its next request, or for its end.

        Raises:
            InfraError: The agent exited with an error.
        """
        assert self._pending is not None, "step before reset"
        pending, self._pending = self._pending, None
        self._tree.add(pending.asked.keys, text)
        del self._waiting[tuple(pending.asked.keys)]
        if not pending.response.done():
            pending.response.set_result(ChatResponse(text, self._size))
        event = await self._events.get()
        if isinstance(event, int):
            return self._make_last_step(event)
        self._pending = event
        return self._make_step(event.asked, self._tree.find(event.asked.keys))

    def _make_step(self, asked: ChatRequest, found: Continuation) -> Step:
        if found.turn is None:
            self.counts.new_prompts += 1
            return Step(messages=asked.messages, reward=0.0, done=False, reason=self.counts.describe(), is_new_prompt=True)
        is_last = found.turn == self._tree.num_turns - 1
        self.counts.continued += is_last
        self.counts.branched += not is_last
        after = asked.messages[found.num_known :]
        return Step(messages=after, reward=0.0, done=False, reason=self.counts.describe(), after_turn=found.turn)

    def _make_last_step(self, code: int) -> Step:
        assert self._process is not None
        if code:
            raise InfraError(self._describe_exit(code))
        result = self._process.last_line("stdout")[:MAX_ANSWER_CHARS]
        call = ToolCall(tool="agent", source="exit", text=result)
        return Step(messages=[], reward=0.0, done=True, reason=self.counts.describe(), tool_call=call)

    def _describe_exit(self, code: int) -> str:
        assert self._process is not None
        said = self._process.last_line("stderr") or self._process.last_line("stdout") or "no output"
        return f"task.options.command={' '.join(self.command)}: the agent exited with code {code} ({said[:300]})"

    async def _watch(self, process: AgentProcess) -> None:
        self._events.put_nowait(await process.wait())

    async def close(self) -> None:
        """End the agent and reject its requests."""
        self._is_closed = True
        if self.server is not None:
            self.server.close_episode(self._key)
        for request in self._waiting.values():
            if not request.response.done():
                request.response.set_exception(ENDED)
                request.response.exception()  # without a client, nobody retrieves it
        try:
            if self._process is not None:
                await self._process.stop()
        finally:
            if self._exit is not None:
                self._exit.cancel()
            if self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            if self._has_slot:
                self.slots.release()
                self._has_slot = False


def write_folder(example: Example) -> str:
    """Create the folder of an agent, with the question and its images as PNG files.

    The folder contains neither the reference answer nor the other columns of the data, which may
    reveal it.
    """
    folder = Path(tempfile.mkdtemp(prefix="agent_"))
    paths = []
    for number, image in enumerate(example.payload["images"]):
        path = folder / f"image_{number}.png"
        image.open().save(path)
        paths.append(str(path))
    question = {"id": example.id, "question": question_text(example), "system": example.payload["system"], "images": paths}
    (folder / EXAMPLE_FILE).write_text(json.dumps(question))
    return str(folder)


def fill_command(command: Sequence[str], example: Example) -> list[str]:
    """Replace {question} in the arguments of the command by the question's text."""
    return [argument.replace("{question}", question_text(example)) for argument in command]


def question_text(example: Example) -> str:
    """Return the question without the placeholders of its images."""
    return str(example.payload["question"]).replace(IMAGE_PLACEHOLDER, "").strip()
