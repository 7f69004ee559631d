"""Which request gets the next free slot, and which prompts are prefilled with it.

Invariants: requests start in the order of their arrival, except that while a swap of weights waits for pinned
requests only pinned ones start. Requests of one submission with equal prompts share a `Prompt`, whose prefix is
computed once and dropped with its last use, or at a swap: a prefix never meets other weights than those that made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from generators.engines.base import GenerationRequest
from generators.engines.hf.prefill import Prefix

# Prompts prefilled beyond those that are needed at once, so that later refills cost no forward pass of their own.
_AHEAD_PROMPTS = 16
_AHEAD_TOKENS = 512


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt shared by requests.

    Attributes:
        ids: token ids; of a request with a prefix, these behind its prompt's.
        prefix: its keys, values and last logits under the present weights; None until prefilled.
    """

    ids: tuple[int, ...]
    prefix: Prefix | None = None


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without a slot."""

    request: GenerationRequest
    prompt: Prompt


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
        prompts: dict[tuple[int, ...], Prompt] = {}
        for request in requests:
            ids = tuple(request.prompt_ids)
            if request.prefix is not None:
                ids += tuple(request.prefix.response_ids.tolist())
            prompt = prompts.setdefault(ids, Prompt(ids))
            self._line.append(Waiting(request, prompt))
            self.pinned += request.pinned

    def take(self, count: int, *, pinned_only: bool) -> list[Waiting]:
        """Removes and returns the next `count` requests that may start."""
        if not pinned_only:
            taken = [self._line.popleft() for _ in range(min(count, len(self._line)))]
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

    def _remove(self, gone: Sequence[Waiting]) -> None:
        if gone:
            ids = {id(waiting) for waiting in gone}
            self._line = deque(waiting for waiting in self._line if id(waiting) not in ids)
