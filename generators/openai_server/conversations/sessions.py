"""Sessions: the calls of one conversation, or of several of one client.

Invariants:

- A session of training has a key of its own and draws tokens by its task's policy, whatever its client asks for.
- A session that is over, or full, takes no call.
- At most `max_sessions` of other clients are kept, with at most `_ALL_TOKENS` tokens, and none longer than `session_s`
  after its last call.
- Calls of one session are prepared one at a time, in the order in which they came. So they are numbered, and drawn,
  alike when they are made again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmesh.generators.engines.types import SamplingParams
from rollmesh.generators.openai_server.conversations.turn_tree import PromptPosition, Turn, TurnTree
from rollmesh.generators.openai_server.errors import overloaded, session_ended, session_full
from rollmesh.mesh.config.rollout import EndpointSection
from rollmesh.mesh.trajectory.branches import Cause
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.seeds import derived_seed

# Tokens that are held of one session, and of all that are not training's: 12 bytes each at most.
_SESSION_TOKENS = 4 << 20
_ALL_TOKENS = 64 << 20
_LONGEST_CONVERSATIONS = 16


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPolicy:
    """Sampling of a member of a group.

    Attributes:
        prompt_ids: the group's prompt, with which every trajectory begins.
        sampling: of the member; `max_tokens` bounds all that follows the prompt.
        pinned: by one version of the weights alone.
        replay: the member's tokens of an earlier holder; repeated for as long as the client asks the same.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    pinned: bool = False
    replay: Trajectory | None = None

    @property
    def limit(self) -> int:
        """Most tokens of the whole conversation."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def replay_of(self, prompt_ids: Sequence[int]) -> Trajectory | None:
        """The recorded answer to a prompt, whole or its beginning; None: this was never asked."""
        if self.replay is None:
            return None
        ids = [*self.prompt_ids, *self.replay.response_ids.tolist()]
        start = len(prompt_ids) - len(self.prompt_ids)
        if not 0 <= start < len(self.replay) or ids[: len(prompt_ids)] != list(prompt_ids):
            return None
        mask = self.replay.response_mask
        if not mask[start] or (start and mask[start - 1]):
            return None
        masked = np.flatnonzero(mask[start:] == 0)
        end = start + int(masked[0]) if len(masked) else len(mask)
        return self.replay.part(start, end)


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """An answer that is being sampled; in a session its prompt has a position."""

    call: int
    choice: int
    position: PromptPosition | None


class Session:
    """A client's conversation, or several of them.

    Args:
        name: stands in the address.
        policy: of training; None: the client decides.
        max_answers: answers that are recorded.

    Attributes:
        key: API key of a client of training; empty: that of the mesh.
        record: of the answers.
        running: by the engine's name of the request.
        preparing: held by the call that is being prepared.
        over: takes no call any more.
        calls: answered, being answered, or refused for their prompts.
        counts: of calls. `aborted`; `forced`: those that asked for another sampling than training has. `no_room`: those
            that were refused because the conversation has used up its tokens, or the session its answers.
            `calls_required`: those whose answers had to call a tool or be JSON.
        causes: of calls that do not continue the answers that were given.
        hidden_tools: names of those that were offered where the conversation's prompt does not show them.
    """

    def __init__(self, name: str, policy: SamplingPolicy | None, max_answers: int) -> None:
        self.name = name
        self.policy = policy
        self._max_answers = max_answers
        self.key = secrets.token_urlsafe(24) if policy is not None else ""
        self.record = TurnTree()
        self.running: dict[str, RunningAnswer] = {}
        self.preparing = asyncio.Lock()
        self.over = False
        self.calls = 0
        self.counts: Counter[str] = Counter()
        self.causes: Counter[Cause] = Counter()
        self.hidden_tools: set[str] = set()
        self.used_at = 0.0

    def check_room(self, answers: int, context: int) -> None:
        """Refuses a call that asks for more answers than can be recorded.

        Args:
            answers: requested.
            context: tokens of a conversation at most.

        Raises:
            ApiError: 410: the session is over; 400: it is full.
        """
        if self.over:
            raise session_ended(self.name)
        total = len(self.record.turns) + len(self.running)
        full = ""
        if total + answers > self._max_answers:
            full = f"{total} answers, of at most {self._max_answers} (rollout.endpoint.session_answers)"
        elif self.record.tokens >= max(_SESSION_TOKENS, _LONGEST_CONVERSATIONS * context):
            full = f"{self.record.tokens} tokens recorded, and no room for more"
        if full:
            self.counts["no_room"] += 1
            raise session_full(self.name, full)

    def count_call(self, cause: Cause | None, offered: Sequence[Any], shown: Sequence[Any]) -> None:
        """Counts a call whose prompt is made.

        Args:
            cause: why it does not continue the answers that were given; None: it does, or there are none.
            offered: its tools.
            shown: those in its prompt.
        """
        if cause is not None:
            self.causes[cause] += 1
        self.hidden_tools |= _names(offered) - _names(shown)

    def causes_of(self, dropped: Sequence[Turn]) -> Counter[Cause]:
        """Turns in branches by cause: that of most calls that began one.

        Args:
            dropped: turns that no trajectory holds.
        """
        choices = sum(turn.choice > 0 for turn in dropped)
        # Calls at the same time begin conversations before any answer is there.
        most = self.causes.most_common(1)[0][0] if self.causes else Cause.ANOTHER
        return Counter({most: len(dropped) - choices, Cause.CHOICES: choices})

    def next_call(self) -> int:
        """The number of a call that begins."""
        self.calls += 1
        return self.calls - 1

    @contextmanager
    def sampling(self, running: dict[str, RunningAnswer]) -> Iterator[None]:
        """Lists requests as running while they are in the engine."""
        self.running.update(running)
        try:
            yield
        finally:
            for name in running:
                self.running.pop(name, None)

    def sampling_of(self, call: int, choice: int, max_tokens: int, stops: Sequence[str]) -> SamplingParams:
        """Sampling parameters of an answer in a session of training."""
        assert self.policy is not None
        policy = self.policy.sampling
        # Different in each call, and alike when the calls are made again.
        seed = derived_seed(policy.seed, call, choice) if policy.seed else 0
        return replace(policy, max_tokens=max_tokens, stop=(*policy.stop, *stops), seed=seed)


def _names(tools: Sequence[Any]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


class Sessions:
    """All sessions of an endpoint.

    Args:
        section: `rollout.endpoint`; number and age are bounded of sessions that are not training's.
        clock: monotonic seconds.
    """

    def __init__(self, section: EndpointSection, clock: Callable[[], float]) -> None:
        self._max = section.max_sessions
        self._session_s = section.session_s
        self._answers = section.session_answers
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        """Sessions that are kept."""
        return len(self._sessions)

    def open_training(self, policy: SamplingPolicy) -> Session:
        """Opens a session of training, under a name that cannot be guessed."""
        session = Session(secrets.token_hex(16), policy, self._answers)
        self._sessions[session.name] = session
        return session

    def find(self, name: str) -> Session | None:
        """The session of this name; None for an unknown name."""
        session = self._sessions.get(name)
        if session is not None and self._is_old(session, self._clock()):
            self.forget(session)
            return None
        return session

    def get_or_create(self, name: str) -> Session:
        """The session of a call; it comes into being with its first one.

        Raises:
            ApiError: 429: there are too many, or they hold too much.
        """
        now = self._clock()
        session = self._sessions.get(name)
        if session is None:
            self._forget_old(now)
        others = [found.record.tokens for found in self._sessions.values() if found.policy is None]
        if sum(others) >= _ALL_TOKENS or (session is None and len(others) >= self._max):
            raise overloaded(
                f"{len(others)} sessions are recorded already, with {sum(others)} tokens: delete some, or wait until "
                "they are forgotten"
            )
        if session is None:
            session = self._sessions[name] = Session(name, None, self._answers)
        session.used_at = now
        return session

    def forget(self, session: Session) -> None:
        """Ends a session; its owner ends the calls that run in it."""
        session.over = True
        self._sessions.pop(session.name, None)

    def _forget_old(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if self._is_old(session, now):
                self.forget(session)

    def _is_old(self, session: Session, now: float) -> bool:
        return session.policy is None and not session.running and now - session.used_at > self._session_s
