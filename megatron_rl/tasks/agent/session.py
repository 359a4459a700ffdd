"""Finds the turn that a request of an agent continues.

A request contains the whole conversation. If its beginning equals the messages of an earlier
request and the response to it, the policy's tokens are continued as they were sampled; only the
messages after that response are tokenized. A request that changes or leaves out earlier messages
continues the longest unchanged part that ends with a response, or starts a new prompt. Responses
are compared by their text and tool calls: an agent that edits a response, for example by removing
white space, starts a new prompt, in which the edited response was not sampled and has no loss.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron_rl.data.tool_calls import ParsedResponse
from megatron_rl.tasks.agent.chat_request import make_response_message, message_key
from megatron_rl.types import Message


@dataclass(slots=True, frozen=True)
class Continuation:
    """Turn that a request continues, and the number of its messages up to that turn's response."""

    turn: int | None
    """Index of the turn; None if the request starts a new prompt."""
    num_known: int
    edited: tuple[int, int] | None = None
    """Index of a turn with an earlier part of the request, and index of the message that the
    request contains in place of that turn's response; None if there is no such turn.
    """


@dataclass(slots=True)
class SessionTree:
    """Turns of an episode, by the messages that lead to them."""

    _turns: dict[str, int] = field(default_factory=dict)
    """Maps the digest of all messages up to and including a response to the turn's index."""
    _requests: dict[str, list[int]] = field(default_factory=dict)
    """Maps the digest of the messages of a request to the indices of its turns."""
    _continued: set[int] = field(default_factory=set)
    """Turns that a later request continues."""
    _texts: dict[str, str] = field(default_factory=dict)
    """Maps the key of a response with tool calls, as a message, to the text that was sampled."""
    num_turns: int = 0

    @property
    def paths(self) -> Collection[str]:
        """Digests of all messages up to and including each response (`path_digests`)."""
        return self._turns.keys()

    @property
    def call_keys(self) -> Collection[str]:
        """Keys of the responses with tool calls, as messages."""
        return self._texts.keys()

    def find(self, keys: Sequence[str]) -> Continuation:
        """Return the turn with the longest history that is a proper prefix of these messages.

        Of several turns with equal messages, the last one is returned. The turn counts as
        continued.
        """
        paths = path_digests(keys[:-1])
        edited = None
        for num_known in range(len(paths), 0, -1):
            turn = self._turns.get(paths[num_known - 1])
            if turn is not None:
                self._continued.add(turn)
                return Continuation(turn, num_known, edited)
            asked = self._requests.get(paths[num_known - 1])
            if asked is not None:
                edited = (asked[-1], num_known)
        return Continuation(None, 0, edited)

    def add(self, keys: Sequence[str], text: str, forms: Sequence[ParsedResponse]) -> None:
        """Record the next turn.

        Args:
            keys: Keys of the messages of its request.
            text: Sampled text.
            forms: Response in each form in which later requests may contain it.
        """
        path = path_digests(keys)[-1]
        self._requests.setdefault(path, []).append(self.num_turns)
        for form in forms:
            key = message_key(make_response_message(form.content, form.calls))
            self._turns[_extend_path(path, key)] = self.num_turns
            if form.calls:
                self._texts[key] = text
        self.num_turns += 1

    def find_abandoned(self) -> list[int]:
        """Return the turns that were not continued although a turn with the same request was."""
        return sorted(
            turn
            for turns in self._requests.values()
            if not self._continued.isdisjoint(turns)
            for turn in turns
            if turn not in self._continued
        )

    def restore_texts(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Return the messages with the sampled text in place of each known response with calls.

        Without this, a tool call in a new prompt is rendered by the chat template, which may write
        it differently.
        """
        return [
            make_response_message(self._texts[key]) if key in self._texts else message for message, key in zip(messages, keys, strict=True)
        ]


def path_digests(keys: Sequence[str]) -> list[str]:
    """Return the digest of every non-empty prefix of the keys."""
    digests, path = [], ""
    for key in keys:
        path = _extend_path(path, key)
        digests.append(path)
    return digests


def _extend_path(path: str, key: str) -> str:
    return hashlib.blake2b(f"{path} {key}".encode(), digest_size=16).hexdigest()
