"""Environment of one episode, in which an agent requests the responses of the policy.

The agent's first request is the prompt of the episode, and every later request is an observation.
Requests that arrive at the same time are answered one after the other. The episode ends when the
agent ends.
"""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.data.tool_calls import ParsedResponse, parse_response
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rollout.engine import ResponseSize
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.agent.agent_process import Agent, AgentExit
from megatron_rl.tasks.agent.chat_request import ChatRequest, ChatResponse, RequestError
from megatron_rl.tasks.agent.launch import REWARD_KEY_VARIABLE, AgentLaunch, start_agent
from megatron_rl.tasks.agent.session import Continuation, SessionTree
from megatron_rl.types import Example, Message, ToolCall

if TYPE_CHECKING:  # imports fastapi
    from megatron_rl.tasks.agent.chat_server import ChatServer

RequestKey = tuple[object, ...]
"""Number of choices, stop strings and message keys of a request."""
MAX_ANSWER_CHARS = 4000
MAX_QUOTED_CHARS = 60
"""Number of characters that are quoted of a response that the agent returned changed."""
ENDED = RequestError("the episode has ended: the policy has reached a limit of the run", code="episode_ended", status=403)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Request of the agent that waits for one response of the policy."""

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
    """Settings of requests that were replaced by those of the run, or ignored."""
    edited: str = ""
    """First response that the agent returned in a changed form: both texts."""

    def describe(self) -> str:
        """Return the counts above 0 in one line."""
        counts = {"continued": self.continued, "branched": self.branched, "new prompts": self.new_prompts, "repeated": self.repeated}
        words = [f"{number} {name}" for name, number in counts.items() if number]
        replaced = [f"replaced {' '.join(sorted(self.replaced))}"] if self.replaced else []
        return ", ".join([*words, *replaced, *([self.edited] if self.edited else [])])


class ExternalAgentEnv(Env):
    """Environment of one episode."""

    def __init__(self, example: Example, *, launch: AgentLaunch, server: "ChatServer | None", slots: asyncio.Semaphore) -> None:
        """Create the environment.

        Args:
            example: Question.
            launch: How the agent is started.
            server: Running server; None before the task has started, when no agent can run.
            slots: Limits the number of agents that run at the same time.
        """
        self.example, self.launch, self.server, self.slots = example, launch, server, slots
        self.counts = RequestCounts()
        self._tree = SessionTree()
        self._events: asyncio.Queue[PendingRequest | AgentExit] = asyncio.Queue()
        """Requests, and the end of the agent."""
        self._pending: PendingRequest | None = None
        """Request that the policy is responding to."""
        self._waiting: dict[RequestKey, list[PendingRequest]] = {}
        """Requests without all their responses."""
        self._answered: dict[tuple[str, RequestKey], list[ChatResponse]] = {}
        """Responses by idempotency key and request."""
        self._sampled: list[str] = []
        """Text of each turn."""
        self._size: ResponseSize | None = None
        self._keys: list[str] = []
        self._posted: float | None = None
        self._agent: Agent | None = None
        self._exit: asyncio.Task[None] | None = None
        self._has_slot = self._is_closed = False

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the request that the policy is responding to."""
        return () if self._pending is None else self._pending.asked.stop

    @property
    def untrained_turns(self) -> list[int]:
        """Abandoned responses, unless they are trained on."""
        return [] if self.launch.trains_abandoned else self._tree.find_abandoned()

    async def reset(self, seed: int) -> list[Message]:
        """Start the agent and return the messages of its first request.

        Raises:
            PermanentInfraError: The agent cannot be started, or ends without a request.
        """
        if self.server is None:
            raise PermanentInfraError("the server of task=agent is not started")
        await self.slots.acquire()
        self._has_slot = True
        self._keys = [self.server.open_episode(self.ask)]
        if self.launch.posts_reward:
            self._keys.append(self.server.open_reward(self.post_reward))
        self._agent = await start_agent(self.launch, self.example, base_url=self.server.base_url, keys=self._keys, seed=seed)
        self._exit = asyncio.create_task(self._watch(self._agent))
        event = await self._events.get()
        if isinstance(event, AgentExit):
            raise PermanentInfraError(f"{event.description} before its first request to OPENAI_BASE_URL")
        self._pending = event
        return event.asked.messages

    def post_reward(self, reward: float) -> None:
        """Set the reward of the episode."""
        self._posted = reward

    async def ask(self, asked: ChatRequest, idempotency_key: str) -> list[ChatResponse]:
        """Return the policy's responses to a request, one per choice.

        A request with the messages of one that still waits shares its responses. So does a request
        with the messages and the idempotency key of an earlier one.

        Raises:
            RequestError: The episode has ended.
        """
        key = (asked.num_choices, asked.stop, *asked.keys)
        known = self._answered.get((idempotency_key, key)) if idempotency_key else None
        if known is not None:
            self.counts.repeated += 1
            return known
        if self._is_closed:
            raise ENDED
        requests = self._waiting.get(key)
        if requests is not None:
            self.counts.repeated += 1
        else:
            loop = asyncio.get_running_loop()
            requests = self._waiting[key] = [PendingRequest(asked, loop.create_future()) for _ in range(asked.num_choices)]
            self.counts.replaced |= {*asked.replaced}
            for request in requests:
                self._events.put_nowait(request)
        # A client that disconnects does not cancel the turns.
        responses = [await asyncio.shield(request.response) for request in requests]
        self._waiting.pop(key, None)
        if idempotency_key:
            self._answered[idempotency_key, key] = responses
        return responses

    def note_response_size(self, size: ResponseSize) -> None:
        """Keep the numbers of tokens for the response to the agent."""
        self._size = size

    async def step(self, text: str) -> Step:
        """Send the response to the agent and wait for its next request, or for its end.

        Raises:
            InfraError: The agent failed.
        """
        assert self._pending is not None, "step before reset"
        pending, self._pending = self._pending, None
        forms = response_forms(text, pending.asked)
        self._tree.add(pending.asked.keys, text, forms)
        self._sampled.append(text)
        if not pending.response.done():
            pending.response.set_result(ChatResponse(forms[0].content, forms[0].calls, self._size))
        event = await self._events.get()
        if isinstance(event, AgentExit):
            return self._make_last_step(event)
        self._pending = event
        return self._make_step(event.asked, self._tree.find(event.asked.keys))

    def _make_step(self, asked: ChatRequest, found: Continuation) -> Step:
        if found.edited is not None and not self.counts.edited:
            self.counts.edited = describe_edit(asked.messages, found.edited, self._sampled)
        after = self._tree.restore_texts(asked.messages, asked.keys)[found.num_known :]
        if found.turn is None:
            self.counts.new_prompts += 1
            return Step(messages=after, reward=0.0, done=False, reason=self.counts.describe(), is_new_prompt=True)
        is_last = found.turn == self._tree.num_turns - 1
        self.counts.continued += is_last
        self.counts.branched += not is_last
        return Step(messages=after, reward=0.0, done=False, reason=self.counts.describe(), after_turn=found.turn)

    def _make_last_step(self, ended: AgentExit) -> Step:
        if ended.is_failed:
            raise InfraError(ended.description)
        result = ended.result[:MAX_ANSWER_CHARS]
        if self.launch.posts_reward:
            if self._posted is None:
                raise InfraError(f"task.reward=posted: the agent ended, but no reward was posted with {REWARD_KEY_VARIABLE}")
            result = json.dumps({"reward": self._posted})
        call = ToolCall(tool="agent", source="exit", text=result)
        return Step(messages=[], reward=0.0, done=True, reason=self.counts.describe(), tool_call=call)

    async def _watch(self, agent: Agent) -> None:
        self._events.put_nowait(await agent.wait())

    async def close(self) -> None:
        """End the agent and reject its requests."""
        self._is_closed = True
        if self.server is not None:
            self.server.close_episode(*self._keys)
        for request in itertools.chain(*self._waiting.values()):
            if not request.response.done():
                request.response.set_exception(ENDED)
                request.response.exception()  # without a client, nobody retrieves it
        try:
            if self._agent is not None:
                await self._agent.stop()
        finally:
            if self._exit is not None:
                self._exit.cancel()
            if self._has_slot:
                self.slots.release()
                self._has_slot = False


def response_forms(text: str, asked: ChatRequest) -> list[ParsedResponse]:
    """Return the forms in which later requests may contain a response; the first one is sent.

    A response ends before the stop string, as in OpenAI's API. Agents may add the stop string
    again.
    """
    starts = [place for each in asked.stop if (place := text.find(each)) >= 0]
    start = min(starts, default=len(text))
    ended = [text[:start], *(text[: start + len(each)] for each in asked.stop if text.startswith(each, start)), text]
    parsed = [parse_response(each) if asked.has_tools else ParsedResponse(each) for each in ended]
    return [form for number, form in enumerate(parsed) if form not in parsed[:number]]


def describe_edit(messages: Sequence[Message], edited: tuple[int, int], sampled: Sequence[str]) -> str:
    """Describe how a message differs from the response that the policy sampled in its place.

    Returns an empty string if the message is not the assistant's.
    """
    turn, index = edited
    message = messages[index]
    if message["role"] != "assistant":
        return ""
    sent = "".join(part["text"] for part in message["content"]) + "".join(json.dumps(call) for call in message.get("tool_calls", ()))
    num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sampled[turn], sent, strict=False)))
    start = max(0, num_equal - MAX_QUOTED_CHARS // 3)
    before, after = (repr(text[start : start + MAX_QUOTED_CHARS]) for text in (sampled[turn], sent))
    return f"response {turn} was returned changed: {before} became {after}"
