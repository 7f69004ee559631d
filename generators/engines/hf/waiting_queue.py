"""The choice of requests for free slots, and of prompts to prefill with them.

Invariants:

- Requests start in the order of their arrival. While a swap of weights waits for pinned requests only such start.
  Interrupted requests stand before those that never started.
- A bounded number of tokens is prefilled per step, fewer where interrupted requests come back, so that running
  sequences continue.
- Requests of one submission with equal prompts (and images) have one `SharedPrompt`. Its prefix is computed once, and
  dropped with its last use or at a swap. So a prefix never meets other weights than those that made it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.generators.engines.hf.model.prefill import Prefix
from rollmesh.generators.engines.types import FinishReason, GenerationRequest, GenerationResult, PartialResponse
from rollmesh.mesh.trajectory.payload_codec import Trajectory

# Prompts prefilled beyond those that are needed at once, so that later refills cost no forward pass of their own.
_AHEAD_PROMPTS = 16
_AHEAD_TOKENS = 512
# Tokens that are prefilled in one step, if not by a single sequence: of new ones, and where one was interrupted.
_STARTED_TOKENS = 8192
_RESUMED_TOKENS = 1024


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt shared by requests.

    Attributes:
        ids: token ids; of a request with a prefix, these after its prompt's.
        images: encoded, of the prompt; their tokens in `ids` are widened.
        prefix: its keys, values and last logits under the present weights; None until prefilled.
    """

    ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    prefix: Prefix | None = None


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request without a slot.

    Attributes:
        request: as submitted; of an interrupted one, with all its tokens as prefix.
        prompt: what is to be prefilled.
        started: monotonic time at which it first had a slot; None for one that never had.
    """

    request: GenerationRequest
    prompt: SharedPrompt
    started: float | None = None


class WaitingQueue:
    """The queue of an engine."""

    def __init__(self) -> None:
        self._queue: deque[WaitingRequest] = deque()
        self.pinned = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return iter(self._queue)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Appends one submission."""
        prompts: dict[tuple[tuple[int, ...], tuple[bytes, ...]], SharedPrompt] = {}
        for request in requests:
            ids = _ids(request)
            prompt = prompts.setdefault((ids, request.images), SharedPrompt(ids, request.images))
            self._queue.append(WaitingRequest(request, prompt))
            self.pinned += request.pinned

    def put_back(self, interrupted: Sequence[WaitingRequest]) -> None:
        """Puts requests that were running at the head, in this order."""
        self._queue.extendleft(reversed(interrupted))
        self.pinned += sum(waiting.request.pinned for waiting in interrupted)

    def pop_waiting(self, count: int, *, pinned_only: bool, fits: Callable[[int, int], bool]) -> list[WaitingRequest]:
        """Removes and returns the next requests that may start.

        Args:
            count: most of them.
            pinned_only: pass over all others.
            fits: takes a number of requests and the tokens of the longest; True where there is room for them.
        """
        popped: list[WaitingRequest] = []
        prompts: set[int] = set()
        tokens = longest = 0
        for waiting in self._queue:
            if len(popped) == count:
                break
            if pinned_only and not waiting.request.pinned:
                continue
            prompt = waiting.prompt
            longest = max(longest, len(prompt.ids))
            if prompt.prefix is None and id(prompt) not in prompts:
                prompts.add(id(prompt))
                tokens += len(prompt.ids)
            limit = _STARTED_TOKENS if waiting.started is None else _RESUMED_TOKENS
            if (popped and tokens > limit) or not fits(len(popped) + 1, longest):
                break
            popped.append(waiting)
        if pinned_only:
            self._remove(popped)
        else:
            for _ in popped:
                self._queue.popleft()
        self.pinned -= sum(waiting.request.pinned for waiting in popped)
        return popped

    def remove(self, request_ids: set[str]) -> list[WaitingRequest]:
        """Removes and returns the requests with these ids."""
        removed = [waiting for waiting in self._queue if waiting.request.request_id in request_ids]
        self._remove(removed)
        self.pinned -= sum(waiting.request.pinned for waiting in removed)
        return removed

    def progress(self, at_least: Mapping[str, int]) -> list[PartialResponse]:
        """The interrupted responses that have as many tokens as `at_least` says of their request."""
        now = time.monotonic()
        copies = []
        for waiting in self._queue:
            prefix, least = waiting.request.prefix, at_least.get(waiting.request.request_id)
            if waiting.started is None or prefix is None or least is None or len(prefix) < least:
                continue
            copies.append(PartialResponse(waiting.request.request_id, prefix, now - waiting.started))
        return copies

    def pinned_ids(self) -> set[str]:
        """Ids of the pinned requests."""
        return {waiting.request.request_id for waiting in self._queue if waiting.request.pinned}

    def sharing(self, prompt: SharedPrompt) -> set[str]:
        """Ids of the requests with this very prompt."""
        return {waiting.request.request_id for waiting in self._queue if waiting.prompt is prompt}

    def to_prefill(self, starting: Iterable[WaitingRequest], *, ahead: bool) -> list[SharedPrompt]:
        """Prompts to prefill so that `starting` can start: theirs, and `ahead` some of the next if any are needed."""
        needed: dict[int, SharedPrompt] = {
            id(waiting.prompt): waiting.prompt for waiting in starting if waiting.prompt.prefix is None
        }
        if not needed or not ahead:
            return list(needed.values())
        tokens = sum(len(prompt.ids) for prompt in needed.values())
        limit = len(needed) + _AHEAD_PROMPTS
        for waiting in self._queue:
            prompt = waiting.prompt
            if prompt.prefix is not None or id(prompt) in needed:
                continue
            tokens += len(prompt.ids)
            if tokens > _AHEAD_TOKENS or len(needed) == limit:
                break
            needed[id(prompt)] = prompt
        return list(needed.values())

    def drop_prefixes(self) -> None:
        """Forgets all prefixes: the weights that made them are gone."""
        for waiting in self._queue:
            waiting.prompt.prefix = None

    def _remove(self, removed: Sequence[WaitingRequest]) -> None:
        if removed:
            ids = {id(waiting) for waiting in removed}
            self._queue = deque(waiting for waiting in self._queue if id(waiting) not in ids)


def interrupted(request: GenerationRequest, started: float) -> WaitingRequest:
    """A request that was running since `started`; its tokens so far are its prefix."""
    return WaitingRequest(request, SharedPrompt(_ids(request), request.images), started)


def unsampled(request: GenerationRequest, reason: FinishReason, refusal: str = "") -> GenerationResult:
    """The result of a request without tokens sampled here: its own prefix."""
    prefix = request.prefix
    return GenerationResult(
        request_id=request.request_id,
        sampled=Trajectory.empty() if prefix is None else prefix,
        finish_reason=reason,
        refusal=refusal,
    )


def _ids(request: GenerationRequest) -> tuple[int, ...]:
    ids = tuple(request.prompt_ids)
    return ids if request.prefix is None else ids + tuple(request.prefix.response_ids.tolist())
