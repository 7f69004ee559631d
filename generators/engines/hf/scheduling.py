"""Which request gets the next free slot, and which prompts are prefilled with it.

Invariants: requests start in the order of their arrival, except that while a swap of weights waits for pinned
requests only pinned ones start; what a swap interrupted stands before what never started, and comes back a bounded
number of tokens per step. Requests of one submission with equal prompts (and images) share a `Prompt`, whose prefix is
computed once and dropped with its last use, or at a swap: a prefix never meets other weights than those that made it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from generators.engines.base import GenerationRequest, PartialResponse
from generators.engines.hf.prefill import Prefix

# Prompts prefilled beyond those that are needed at once, so that later refills cost no forward pass of their own.
_AHEAD_PROMPTS = 16
_AHEAD_TOKENS = 512
# Tokens of interrupted sequences that are prefilled in one step, if not by a single one.
_RESUMED_TOKENS = 1024


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt shared by requests.

    Attributes:
        ids: token ids; of a request with a prefix, these behind its prompt's.
        images: encoded, of the prompt; their tokens in `ids` are widened.
        prefix: its keys, values and last logits under the present weights; None until prefilled.
    """

    ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    prefix: Prefix | None = None


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without a slot.

    Attributes:
        request: as submitted; of an interrupted one, with all its tokens as prefix.
        prompt: what is to be prefilled.
        started: monotonic time at which it first had a slot; None for one that never had.
    """

    request: GenerationRequest
    prompt: Prompt
    started: float | None = None


class WaitingLine:
    """The queue of an engine."""

    def __init__(self) -> None:
        self._line: deque[Waiting] = deque()
        self.pinned = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Appends one submission."""
        prompts: dict[tuple[tuple[int, ...], tuple[bytes, ...]], Prompt] = {}
        for request in requests:
            ids = _ids(request)
            prompt = prompts.setdefault((ids, request.images), Prompt(ids, request.images))
            self._line.append(Waiting(request, prompt))
            self.pinned += request.pinned

    def put_back(self, interrupted: Sequence[Waiting]) -> None:
        """Puts requests that were running at the head, in this order."""
        self._line.extendleft(reversed(interrupted))
        self.pinned += sum(waiting.request.pinned for waiting in interrupted)

    def take(self, count: int, *, pinned_only: bool) -> list[Waiting]:
        """Removes and returns the next `count` requests that may start."""
        if not pinned_only:
            taken = self._take_first(count)
        else:
            taken = []
            for waiting in self._line:
                if len(taken) == count:
                    break
                if waiting.request.pinned:
                    taken.append(waiting)
            self._remove(taken)
        self.pinned -= sum(waiting.request.pinned for waiting in taken)
        return taken

    def withdraw(self, request_ids: set[str]) -> list[Waiting]:
        """Removes and returns the requests with these ids."""
        found = [waiting for waiting in self._line if waiting.request.request_id in request_ids]
        self._remove(found)
        self.pinned -= sum(waiting.request.pinned for waiting in found)
        return found

    def progress(self, at_least: Mapping[str, int]) -> list[PartialResponse]:
        """What there is of interrupted responses that have as many tokens as `at_least` says of their request."""
        now = time.monotonic()
        found = []
        for waiting in self._line:
            prefix, wanted = waiting.request.prefix, at_least.get(waiting.request.request_id)
            if waiting.started is None or prefix is None or wanted is None or len(prefix) < wanted:
                continue
            found.append(PartialResponse(waiting.request.request_id, prefix, now - waiting.started))
        return found

    def pinned_ids(self) -> set[str]:
        """Of the pinned requests."""
        return {waiting.request.request_id for waiting in self._line if waiting.request.pinned}

    def to_prefill(self, starting: Iterable[Waiting]) -> list[Prompt]:
        """Prompts to prefill so that `starting` can start: theirs, and some of the next in line if any are needed."""
        needed: dict[int, Prompt] = {
            id(waiting.prompt): waiting.prompt for waiting in starting if waiting.prompt.prefix is None
        }
        if not needed:
            return []
        tokens = sum(len(prompt.ids) for prompt in needed.values())
        limit = len(needed) + _AHEAD_PROMPTS
        for waiting in self._line:
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
        for waiting in self._line:
            waiting.prompt.prefix = None

    def _take_first(self, count: int) -> list[Waiting]:
        taken: list[Waiting] = []
        resumed = 0
        while self._line and len(taken) < count:
            waiting = self._line[0]
            if waiting.started is not None and waiting.prompt.prefix is None:
                resumed += len(waiting.prompt.ids)
                if taken and resumed > _RESUMED_TOKENS:
                    break
            taken.append(self._line.popleft())
        return taken

    def _remove(self, gone: Sequence[Waiting]) -> None:
        if gone:
            ids = {id(waiting) for waiting in gone}
            self._line = deque(waiting for waiting in self._line if id(waiting) not in ids)


def interrupted(request: GenerationRequest, started: float) -> Waiting:
    """A request that was running since `started`; its tokens so far are its prefix."""
    return Waiting(request, Prompt(_ids(request), request.images), started)


def _ids(request: GenerationRequest) -> tuple[int, ...]:
    ids = tuple(request.prompt_ids)
    return ids if request.prefix is None else ids + tuple(request.prefix.response_ids.tolist())
