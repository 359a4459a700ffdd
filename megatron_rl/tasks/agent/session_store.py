"""Conversations that the endpoint remembers, so that later requests continue their tokens.

In a run, the key of a request names its episode, and a SessionTree holds the turns of that episode.
Without episodes, a session is found by its contents: it is the one with the longest history that is
a prefix of the request. A request without such a history starts a session, unless it returns a
response with tool calls of a session, which it then joins. Of several sessions with equal messages,
the one that was used last is found.

The number of sessions is bounded. The least recently used session is dropped first. A request that
continues a dropped session is rendered from its messages, and is counted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from megatron_rl.data.tool_calls import ParsedResponse
from megatron_rl.tasks.agent.session import Continuation, SessionTree, path_digests

MAX_TOKENS = 64 << 20
"""Maximum number of tokens in all sessions, each of which takes four bytes."""
TURN_TOKENS = 128
"""Number of tokens that take as much memory as the digests and the text of a turn."""
MAX_DROPPED_PATHS = 100_000
"""Number of responses of dropped sessions that are recognized."""


@dataclass(slots=True, eq=False)
class Session:
    """Turns of one conversation and its branches, with their tokens."""

    tree: SessionTree = field(default_factory=SessionTree)
    size: int = 0
    """Number of tokens, including TURN_TOKENS for each turn."""
    _parents: list[int | None] = field(default_factory=list)
    _added: list["array[int]"] = field(default_factory=list)
    """Tokens of each turn after those of its parent: messages and response."""

    def add(self, parent: int | None, added: Sequence[int]) -> None:
        """Record the tokens of the tree's next turn; `parent` is the turn that it continues."""
        self._parents.append(parent)
        self._added.append(array("i", added))
        self.size += len(added) + TURN_TOKENS

    def read_tokens(self, turn: int) -> list[int]:
        """Return the sequence that ends with the response of a turn."""
        parts: list[array[int]] = []
        at: int | None = turn
        while at is not None:
            parts.append(self._added[at])
            at = self._parents[at]
        return list(chain.from_iterable(reversed(parts)))


@dataclass(slots=True, frozen=True)
class FoundSession:
    """Session of a request, and the turn that it continues."""

    session: Session
    continuation: Continuation
    is_dropped: bool
    """True if the request has a longer history that was dropped."""


class SessionStore:
    """Sessions by their contents."""

    def __init__(self, *, max_sessions: int, max_tokens: int = MAX_TOKENS) -> None:
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        """Sessions, least recently used first."""
        self._by_path: dict[str, Session] = {}
        """Maps the digest of all messages up to and including a response to its session."""
        self._by_call: dict[str, Session] = {}
        """Maps the key of a response with tool calls to its session."""
        self._dropped_paths: OrderedDict[str, None] = OrderedDict()
        self.num_dropped = 0
        """Number of sessions that were dropped."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, keys: Sequence[str]) -> FoundSession:
        """Return the session of a request; a new one if there is none.

        `keys` are those of the request's messages.
        """
        session, is_dropped = None, False
        for path in reversed(path_digests(keys[:-1])):
            session = self._by_path.get(path)
            if session is not None:
                break
            is_dropped |= path in self._dropped_paths
        if session is None:
            session = next((self._by_call[key] for key in reversed(keys) if key in self._by_call), None)
        if session is None:
            session = Session()
        return FoundSession(session, session.tree.find(keys), is_dropped)

    def add(self, found: FoundSession, keys: Sequence[str], added: Sequence[int], *, text: str, forms: Sequence[ParsedResponse]) -> None:
        """Record a response, and drop sessions above the limits.

        Args:
            found: Session of the request.
            keys: Keys of the request's messages.
            added: Tokens after those of the continued turn: messages and response.
            text: Sampled text.
            forms: As for SessionTree.add.
        """
        session = found.session
        session.tree.add(keys, text, forms)
        session.add(found.continuation.turn, added)
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        for path in session.tree.paths:
            self._by_path[path] = session
            self._dropped_paths.pop(path, None)
        self._by_call.update(dict.fromkeys(session.tree.call_keys, session))
        while len(self._sessions) > self._max_sessions or sum(each.size for each in self._sessions) > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        session, _ = self._sessions.popitem(last=False)
        self.num_dropped += 1
        for path in session.tree.paths:
            if self._by_path.get(path) is session:
                del self._by_path[path]
                self._dropped_paths[path] = None
        for key in session.tree.call_keys:
            if self._by_call.get(key) is session:
                del self._by_call[key]
        while len(self._dropped_paths) > MAX_DROPPED_PATHS:
            self._dropped_paths.popitem(last=False)
