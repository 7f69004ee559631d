"""A job on the server: the tokens that have come, those that were delivered, and its end.

After an update there are tokens of uncertain version (see `version_attribution`). A job with `REVEAL_TOKENS` of these
has its request aborted, and continues with another one after its tokens. Under a grammar it waits for its end instead.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.version_labels import first_runs
from rollmesh.generators.engines.sglang.version_attribution import Event, VersionAttributor
from rollmesh.generators.engines.stop_strings import StopMatcher

if TYPE_CHECKING:
    from rollmesh.generators.engines.external.served_adapters import LiveAdapter

REVEAL_TOKENS = 32


class JobState(Enum):
    """The state of a job; the last one is final."""

    # A request runs, or is about to be made.
    RUNNING = auto()
    # Its request is ended so that the server reports the versions of its tokens; another one follows.
    REVEALING = auto()
    # It is to end, with the tokens that the server still has.
    ABORTED = auto()
    FINISHED = auto()


class StreamedJob:
    """A job and its progress on the server.

    Args:
        job: as asked for.
        on_chunk: gets its chunks.
        matcher: of its stop strings; None where it has none.
        eos: token ids that end a response.
        adapter: with which it computes; None: with whole weights.

    Attributes:
        state: see `JobState`.
        rid: name of its request on the server; empty before the first.
        key: of its keys and values in the server's cache; None before its first request, and where they are outdated.
        reader: reads the answer to its request; gives the server's reason for the end.
    """

    def __init__(
        self,
        job: DecodeJob,
        on_chunk: Callable[[DecodeChunk], None],
        matcher: StopMatcher | None,
        *,
        eos: frozenset[int],
        adapter: LiveAdapter | None,
    ) -> None:
        self.job = job
        self.adapter = adapter
        self._on_chunk = on_chunk
        self._matcher = matcher
        self._eos = eos
        self.state = JobState.RUNNING
        self.rid = ""
        self.key: str | None = None
        self.reader: asyncio.Task[str | None] | None = None
        self._attributor: VersionAttributor | None = None
        self._received: list[int] = []
        self._delivered = 0
        self._stop_at: int | None = None
        self._forced_retractions = 0

    @property
    def finished(self) -> bool:
        """True if its last chunk was delivered, or no caller waits for it."""
        return self.state is JobState.FINISHED

    @property
    def has_begun(self) -> bool:
        """True if tokens of its present request have come."""
        return self._attributor is not None and self._attributor.total > 0

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens after which its next request samples: the prompt, and all that have come."""
        return [*self.job.token_ids, *self._received] if self._received else self.job.token_ids

    @property
    def tokens_left(self) -> int:
        """Tokens that its next request may sample."""
        return self.job.sampling.max_tokens - len(self._received)

    # --- its requests ---

    def begin_request(self, label: str, cache_key: str, *, one_front: bool) -> None:
        """Begins another request, under a name of its own.

        Args:
            label: of the weights in service.
            cache_key: of keys and values made by them; taken where the job has no key.
            one_front: see `VersionAttributor`.
        """
        self.rid = uuid.uuid4().hex
        self._attributor = VersionAttributor(label, one_front=one_front)
        self._forced_retractions = 0
        if self.state is JobState.REVEALING:
            self.state = JobState.RUNNING
        if self.key is None:
            self.key = cache_key

    def begin_update(self, *, recompute: bool) -> bool:
        """Records that the version of its tokens is uncertain from here on.

        Returns:
            True if its request is to be made again: no token has come yet.
        """
        if self._attributor is None:
            return False
        self._attributor.saw_update = True
        self._forced_retractions += recompute
        if self._received or self.finished:
            return False
        self.key = None
        return True

    def preemptions(self, event: Event) -> int:
        """Preemptions of a request that no update asked for, by its last event; 0 before."""
        if event.reason is None:
            return 0
        return max(0, int(event.meta.get("num_retractions") or 0) - self._forced_retractions)

    # --- its tokens ---

    def add(self, event: Event) -> None:
        """Adds an event of its request, and delivers the tokens that are certain now; the job may be finished by it.

        Raises:
            EngineError: see `VersionAttributor.add`.
        """
        assert self._attributor is not None, "a request was made"
        self._find_stop(event.token_ids)
        self._received.extend(event.token_ids)
        ids, log_probs, versions = self._attributor.add(event)
        if self.adapter is not None and ids:
            # The server knows the version of the base, which is one for the whole request.
            versions = [(len(ids), self.adapter.label)]
        finish = self._finish_reason(event)
        if self._stop_at is not None and self._stop_at <= self._delivered + len(ids):
            keep = self._stop_at - self._delivered
            self._finish(ids[:keep], log_probs[:keep], first_runs(versions, keep), "stop")
        elif finish is not None:
            self._finish(ids, log_probs, versions, finish)
        elif ids:
            self._delivered += len(ids)
            self._on_chunk(DecodeChunk(ids, log_probs, versions))

    def reveal_if_due(self) -> bool:
        """Begins to reveal versions where the job waits for them; returns whether it did, so that its request ends."""
        if self.state is not JobState.RUNNING:
            return False
        assert self._attributor is not None, "a request was made"
        if self._stop_at is None and self.job.sampling.grammar:
            # Another request would follow the grammar from its beginning.
            return False
        if self._stop_at is None and len(self._attributor.undecided[0]) < REVEAL_TOKENS:
            return False
        self.state = JobState.REVEALING
        return True

    def abort(self) -> None:
        """Lets it end with the tokens that the server still has."""
        self.state = JobState.ABORTED

    def abandon(self) -> None:
        """Finishes it without a chunk: its caller has left."""
        self.state = JobState.FINISHED

    def end_aborted(self) -> None:
        """Finishes it without more tokens."""
        self.state = JobState.FINISHED
        self._on_chunk(DecodeChunk([], [], [], "aborted"))

    def _find_stop(self, token_ids: Sequence[int]) -> None:
        if self._matcher is None or self._stop_at is not None:
            return
        matches = (index for index, token in enumerate(token_ids) if self._matcher.push((token,)))
        match = next(matches, None)
        self._stop_at = None if match is None else len(self._received) + match + 1

    def _finish_reason(self, event: Event) -> Any:
        """The reason for the end of the job; None where it continues."""
        if event.reason in (None, "stop", "length"):
            return event.reason
        if self._received and self._received[-1] in self._eos:
            return "stop"
        if len(self._received) >= self.job.sampling.max_tokens:
            return "length"
        return "aborted" if self.state is JobState.ABORTED else None

    def _finish(self, ids: list[int], log_probs: list[float], versions: list[tuple[int, str]], finish: Any) -> None:
        self.state = JobState.FINISHED
        self._on_chunk(DecodeChunk(ids, log_probs, versions, finish))
