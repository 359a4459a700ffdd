"""Finds the turn that a request of an agent continues.

A request contains the whole conversation. If its beginning equals the messages of an earlier
request and the response to it, the policy's tokens are continued as they were sampled; only the
messages after that response are tokenized. A request that changes or leaves out earlier messages
continues the longest unchanged part that ends with a response, or starts a new prompt. Responses
are compared as text: an agent that edits a response, for example by removing white space, starts a
new prompt, in which the edited response was not sampled and has no loss.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.tasks.agent.chat_request import make_response_message, message_key


@dataclass(slots=True, frozen=True)
class Continuation:
    """Turn that a request continues, and the number of its messages up to that turn's response."""

    turn: int | None
    """Index of the turn; None if the request starts a new prompt."""
    num_known: int


@dataclass(slots=True)
class SessionTree:
    """Turns of an episode, by the messages that lead to them."""

    _turns: dict[str, int] = field(default_factory=dict)
    """Maps the digest of all messages up to and including a response to the turn's index."""
    num_turns: int = 0

    def find(self, keys: Sequence[str]) -> Continuation:
        """Return the turn with the longest history that is a proper prefix of these messages.

        Of several turns with equal messages, the last one is returned.
        """
        paths = _path_digests(keys[:-1])
        for num_known in range(len(paths), 0, -1):
            turn = self._turns.get(paths[num_known - 1])
            if turn is not None:
                return Continuation(turn, num_known)
        return Continuation(None, 0)

    def add(self, keys: Sequence[str], response: str) -> None:
        """Record the next turn: the messages of its request, and the response."""
        path = _path_digests([*keys, message_key(make_response_message(response))])
        self._turns[path[-1]] = self.num_turns
        self.num_turns += 1


def _path_digests(keys: Sequence[str]) -> list[str]:
    """Return the digest of every non-empty prefix of the keys."""
    digests, path = [], ""
    for key in keys:
        path = hashlib.blake2b(f"{path} {key}".encode(), digest_size=16).hexdigest()
        digests.append(path)
    return digests
