"""Sessions: what belongs together of the calls that come in.

Invariants: a session of training has a key of its own and draws tokens by its task's rules, whatever its client asks
for; a session that is over takes no call; at most `max_sessions` of other clients are kept, and none longer than
`session_s` after its last call.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from generators.endpoint.failures import overloaded, session_over
from generators.endpoint.record import Record
from generators.engines.base import SampledTokens, SamplingParams
from mesh.versions import VersionRuns


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """How a member of a group is sampled.

    Attributes:
        prompt_ids: the group's prompt, with which every trajectory begins.
        sampling: of the member; `max_tokens` bounds all that follows the prompt.
        pinned: by one version of the weights alone.
        replay: what an earlier holder has of the member; it is repeated for as long as the client asks the same.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    pinned: bool = False
    replay: SampledTokens | None = None

    @property
    def limit(self) -> int:
        """Tokens of the whole conversation at most."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def replayed(self, prompt_ids: Sequence[int]) -> SampledTokens | None:
        """The recorded answer to a prompt, whole or its beginning; None: this was never asked."""
        if self.replay is None:
            return None
        ids = [*self.prompt_ids, *self.replay.response_ids.tolist()]
        start = len(prompt_ids) - len(self.prompt_ids)
        if not 0 <= start < len(self.replay) or ids[: len(prompt_ids)] != list(prompt_ids):
            return None
        mask = np.ones(len(self.replay), np.uint8) if self.replay.mask is None else self.replay.mask
        if not mask[start] or (start and mask[start - 1]):
            return None
        masked = np.flatnonzero(mask[start:] == 0)
        end = start + int(masked[0]) if len(masked) else len(mask)
        return first_tokens(self.replay, end, start)


def first_tokens(sampled: SampledTokens, end: int, start: int = 0) -> SampledTokens:
    """Tokens `start` to `end`, of which none is masked."""
    versions = itertools.islice(sampled.versions, start, end)
    return SampledTokens(
        sampled.response_ids[start:end], sampled.log_probs[start:end], VersionRuns.from_tokens(versions)
    )


@dataclass(frozen=True, slots=True)
class Running:
    """An answer that is being sampled."""

    call: int
    choice: int
    prompt_ids: tuple[int, ...]


class Session:
    """One client's conversation, or several.

    Args:
        name: stands in the address.
        rules: of training; None: the client decides.

    Attributes:
        key: what a client of training has to show; empty: what the mesh asks for.
        record: of the answers.
        running: by the engine's name of the request.
        over: takes no call any more.
        calls: answered or being answered.
        counts: `aborted` calls; `forced`: those that asked for another sampling than training has; `no_room`: those
            that were refused because the conversation has used up its tokens.
    """

    def __init__(self, name: str, rules: Rules | None = None) -> None:
        self.name = name
        self.rules = rules
        self.key = secrets.token_urlsafe(24) if rules is not None else ""
        self.record = Record()
        self.running: dict[str, Running] = {}
        self.over = False
        self.calls = 0
        self.counts: Counter[str] = Counter()
        self.used_at = 0.0

    def next_call(self) -> int:
        """The number of a call that begins.

        Raises:
            ApiError: 410: the session is over.
        """
        if self.over:
            raise session_over(self.name)
        self.calls += 1
        return self.calls - 1

    @contextmanager
    def sampling(self, running: dict[str, Running]) -> Iterator[None]:
        """While requests are in the engine."""
        self.running.update(running)
        try:
            yield
        finally:
            for name in running:
                self.running.pop(name, None)

    def sampling_of(self, call: int, choice: int, max_tokens: int, stops: Sequence[str]) -> SamplingParams:
        """How an answer of a session of training is drawn."""
        assert self.rules is not None
        rules = self.rules.sampling
        # Different in each call, and alike when the calls are made again.
        seed = (rules.seed * 0x9E3779B1 + 0x85EBCA77 * call + choice) % (1 << 63) or 1
        return replace(rules, max_tokens=max_tokens, stop=(*rules.stop, *stops), seed=seed if rules.seed else 0)


class Sessions:
    """All sessions of an endpoint.

    Args:
        max_sessions, session_s: see `rollout.endpoint`; they hold for sessions that are not training's.
        clock: monotonic seconds.
    """

    def __init__(self, max_sessions: int, session_s: float, clock: Callable[[], float]) -> None:
        self._max = max_sessions
        self._session_s = session_s
        self._clock = clock
        self._found: dict[str, Session] = {}

    def __len__(self) -> int:
        """Sessions that are kept."""
        return len(self._found)

    def train(self, rules: Rules) -> Session:
        """A session of training, under a name that cannot be guessed."""
        session = Session(secrets.token_hex(16), rules)
        self._found[session.name] = session
        return session

    def known(self, name: str) -> Session | None:
        """A session that is kept."""
        session = self._found.get(name)
        if session is not None and self._is_old(session, self._clock()):
            self.forget(session)
            return None
        return session

    def of(self, name: str) -> Session:
        """The session of a call; it comes into being with its first one.

        Raises:
            ApiError: 429: there are too many.
        """
        now = self._clock()
        session = self._found.get(name)
        if session is None:
            self._forget_old(now)
            others = sum(session.rules is None for session in self._found.values())
            if others >= self._max:
                raise overloaded(
                    f"{others} sessions are recorded already: delete some, or wait until they are forgotten"
                )
            session = self._found[name] = Session(name)
        session.used_at = now
        return session

    def forget(self, session: Session) -> None:
        """Ends a session; what runs in it is its owner's affair."""
        session.over = True
        self._found.pop(session.name, None)

    def _forget_old(self, now: float) -> None:
        for session in list(self._found.values()):
            if self._is_old(session, now):
                self.forget(session)

    def _is_old(self, session: Session, now: float) -> bool:
        return session.rules is None and not session.running and now - session.used_at > self._session_s
