"""The running sequences: one row per slot, in arrays on the host.

Invariants: rows [0, rows) are in use, apart from `holes`: their sequences have ended. For a row in use `position` is
the number of tokens whose keys and values are cached (0 for a hole). `tokens[row, :position]` are those tokens, and
`tokens[row, position]` is the last sampled one, which is fed next. (A new row, before its first sample, has none.)
Per-step work is a handful of vectorized operations, whatever the number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.generators.engines.hf.sampling import RowSampling
from rollmesh.generators.engines.stop_strings import StopMatcher
from rollmesh.generators.engines.token_grammar import GrammarMatcher
from rollmesh.generators.engines.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    TokenEvent,
)
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.routing import ROUTED_EXPERTS
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

_FIRST_CAPACITY = 64


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A request with a slot.

    Attributes:
        request: as submitted.
        marks: (index of the first response token, version that produces tokens from there on).
        matcher: finds its stop strings; None without any.
        grammar: the tokens that may come next; None: all.
        started: monotonic time at which it got its slot.
    """

    request: GenerationRequest
    marks: list[tuple[int, PolicyVersion]]
    matcher: StopMatcher | None
    grammar: GrammarMatcher | None = None
    started: float = field(default_factory=time.monotonic)


class SlotTable:
    """Rows of running sequences."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows = 0
        self.holes: list[int] = []
        self.running: list[RunningSequence | None] = [None] * slots
        self.position = np.zeros(slots, np.int64)
        self.prompt_length = np.zeros(slots, np.int64)
        self.last_position = np.zeros(slots, np.int64)
        self.last_token = np.zeros(slots, np.int64)
        self.generator = np.zeros(slots, np.uint64)
        self._temperature = np.ones(slots, np.float32)
        self._greedy = np.zeros(slots, np.bool_)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self.tokens = np.zeros((slots, _FIRST_CAPACITY), np.int32)
        self.log_probs = np.zeros((slots, _FIRST_CAPACITY), np.float32)
        self._experts: NDArray[np.generic] | None = None
        self._index = np.arange(slots)
        self._sampling: RowSampling | None = None
        self._watched: list[int] | None = None
        self._streamed: list[int] | None = None
        self._outside: int | None = None
        self._grammars: list[tuple[int, GrammarMatcher]] | None = None

    @property
    def active(self) -> int:
        """Sequences that have not ended."""
        return self.rows - len(self.holes)

    @property
    def longest(self) -> int:
        """Cached tokens of the longest sequence."""
        # `rows` is read once: other threads call this too, while the last sequence ends.
        return int(self.position[: self.rows].max(initial=0))

    def by_start(self) -> list[int]:
        """Rows of the sequences, in the order in which they started."""
        started = [(running.started, row) for row, running in enumerate(self.running) if running is not None]
        return [row for _, row in sorted(started)]

    @property
    def free(self) -> int:
        """Slots that can be given out."""
        return self.slots - self.active

    def open(self, running: RunningSequence, ids: tuple[int, ...], limit: int, seed: int) -> int:
        """Gives a request a row and returns it; where that raises the table is as it was.

        Args:
            running: the request.
            ids: token ids of its prompt and, if it brings one, its prefix.
            limit: most response tokens, more than its prefix has.
            seed: 64-bit state of the row's random numbers.
        """
        row = self.holes[-1] if self.holes else self.rows
        length = len(ids)
        self.reserve(length + 1)
        request, prefix = running.request, running.request.prefix
        sampling, prompt_length = request.sampling, len(request.prompt_ids)
        greedy = sampling.temperature == 0
        self.prompt_length[row] = prompt_length
        self.last_position[row] = prompt_length + limit - 1
        self.last_token[row] = 0
        self.generator[row] = seed
        self._temperature[row] = 1.0 if greedy else sampling.temperature
        self._greedy[row] = greedy
        self._top_k[row] = 0 if greedy else sampling.top_k
        self._top_p[row] = 1.0 if greedy else sampling.top_p
        self.tokens[row, :length] = ids
        if prefix is not None:
            self.log_probs[row, prompt_length:length] = prefix.log_probs
        # From here on the row is in use: what could fail has not.
        if self.holes:
            self.holes.pop()
        self.rows = max(self.rows, row + 1)
        self.running[row] = running
        self.position[row] = length
        self._membership_changed()
        return row

    def record(self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Appends one sampled token per row; `position` already counts the step's forward pass."""
        rows, position = self.rows, self.position[: self.rows]
        self.reserve(int(position.max()) + 1)
        index = self._index[:rows]
        self.tokens[index, position] = tokens
        self.log_probs[index, position] = log_probs
        self.last_token[:rows] = tokens

    def record_prefix_experts(self, row: int, experts: NDArray[np.generic]) -> None:
        """Keeps the experts of a new row's tokens.

        Args:
            row: of the sequence.
            experts: [tokens, layers, K], of its prompt and prefix.
        """
        if self._experts is None:
            self._experts = np.zeros((*self.tokens.shape, *experts.shape[1:]), experts.dtype)
        self._experts[row, : len(experts)] = experts

    def record_experts(self, experts: NDArray[np.generic]) -> None:
        """Keeps the experts of the token that each row has fed; `position` does not count the step yet.

        Args:
            experts: [rows, layers, K]; those of rows without a sequence, or with a new one, are written over later.
        """
        if self._experts is not None:
            self._experts[self._index[: self.rows], self.position[: self.rows]] = experts

    def close(self, row: int, reason: FinishReason) -> GenerationResult:
        """Ends a row: it becomes a hole, and its sequence a result."""
        running = self.running[row]
        assert running is not None
        sampled = self._sampled(row, running)
        side = {}
        if self._experts is not None:
            side[ROUTED_EXPERTS] = self._experts[row, : self.position[row]].copy()
        self.clear_row(row)
        return GenerationResult(
            request_id=running.request.request_id,
            sampled=sampled,
            finish_reason=reason,
            side=side,
        )

    def clear_row(self, row: int) -> None:
        """Makes a hole of a row, whatever it has."""
        self.running[row] = None
        self.position[row] = 0
        self.holes.append(row)
        self._membership_changed()

    def progress(self, at_least: Mapping[str, int]) -> list[PartialResponse]:
        """Copies of the running responses that have as many tokens as `at_least` says of their request."""
        now = time.monotonic()
        copies = []
        for row, running in enumerate(self.running[: self.rows]):
            if running is None:
                continue
            least = at_least.get(running.request.request_id)
            if least is not None and self._drawn(row) >= least:
                sampled = self._sampled(row, running)
                copies.append(PartialResponse(running.request.request_id, sampled, now - running.started))
        return copies

    def mark_serving(self, version: PolicyVersion) -> None:
        """Records that tokens are drawn by `version` from here on."""
        for row, running in enumerate(self.running):
            if running is not None:
                running.marks.append((self._drawn(row), version))

    def next_move(self) -> tuple[int, int] | None:
        """Takes one hole out of use; returns the (source, target) rows to be moved for it, or None where none is."""
        hole = self.holes.pop()
        source = self.rows - 1
        self.rows = source
        if hole == source:
            return None
        if source in self.holes:
            # The last row is itself a hole: it leaves, the other one stays to be closed.
            self.holes[self.holes.index(source)] = hole
            return None
        self._move(source, hole)
        return source, hole

    def rows_with_stop_strings(self) -> list[int]:
        """Rows with stop strings."""
        if self._watched is None:
            self._watched = [
                row for row, running in enumerate(self.running[: self.rows]) if running and running.matcher
            ]
        return self._watched

    def grammars(self) -> list[tuple[int, GrammarMatcher]]:
        """Rows with a grammar, and their matchers."""
        if self._grammars is None:
            self._grammars = [
                (row, running.grammar)
                for row, running in enumerate(self.running[: self.rows])
                if running and running.grammar
            ]
        return self._grammars

    def outside(self) -> int:
        """Number of rows with requests from outside of the run."""
        if self._outside is None:
            self._outside = sum(running.request.outside for running in self.running[: self.rows] if running)
        return self._outside

    def events(self, version: PolicyVersion) -> list[TokenEvent]:
        """The tokens that `record` appended to streamed responses, drawn by `version`."""
        if self._streamed is None:
            self._streamed = [
                row for row, running in enumerate(self.running[: self.rows]) if running and running.request.stream
            ]
        runs = VersionRuns(((1, version),))
        events = []
        for row in self._streamed:
            running, at = self.running[row], int(self.position[row])
            assert running is not None
            ids, log_probs = self.tokens[row, at : at + 1].copy(), self.log_probs[row, at : at + 1].copy()
            events.append(TokenEvent(running.request.request_id, Trajectory.sampled(ids, log_probs, runs)))
        return events

    def sampling(self, device: torch.device) -> RowSampling:
        """Sampling parameters of rows [0, rows)."""
        if self._sampling is None:
            rows = self.rows
            temperature, greedy = self._temperature[:rows], self._greedy[:rows]
            top_k, top_p = self._top_k[:rows], self._top_p[:rows]
            filtered = bool((top_k > 0).any() or (top_p < 1).any())
            self._sampling = RowSampling(
                temperature=_column(temperature, device) if bool((temperature != 1).any()) else None,
                greedy=torch.from_numpy(greedy.copy()).to(device) if bool(greedy.any()) else None,
                top_k=_column(top_k, device) if filtered else None,
                top_p=_column(top_p, device) if filtered else None,
            )
        return self._sampling

    def reserve(self, capacity: int) -> None:
        """Makes room for sequences of `capacity` tokens."""
        have = self.tokens.shape[1]
        if capacity <= have:
            return
        new = have
        while new < capacity:
            new *= 2
        self.tokens = np.pad(self.tokens, ((0, 0), (0, new - have)))
        self.log_probs = np.pad(self.log_probs, ((0, 0), (0, new - have)))
        if self._experts is not None:
            self._experts = np.pad(self._experts, ((0, 0), (0, new - have), (0, 0), (0, 0)))

    def _drawn(self, row: int) -> int:
        return int(self.position[row] - self.prompt_length[row]) + 1

    def _sampled(self, row: int, running: RunningSequence) -> Trajectory:
        begin, end = int(self.prompt_length[row]), int(self.position[row]) + 1
        return Trajectory(
            response_ids=self.tokens[row, begin:end].copy(),
            log_probs=self.log_probs[row, begin:end].copy(),
            response_mask=running.request.response_mask(end - begin),
            versions=_runs(running.marks, end - begin),
        )

    def _move(self, source: int, target: int) -> None:
        self.running[target], self.running[source] = self.running[source], None
        for column in (
            self.position,
            self.prompt_length,
            self.last_position,
            self.last_token,
            self.generator,
            self._temperature,
            self._greedy,
            self._top_k,
            self._top_p,
        ):
            column[target] = column[source]
        end = int(self.position[source]) + 1
        self.tokens[target, :end] = self.tokens[source, :end]
        self.log_probs[target, :end] = self.log_probs[source, :end]
        if self._experts is not None:
            self._experts[target, :end] = self._experts[source, :end]
        self._membership_changed()

    def _membership_changed(self) -> None:
        self._sampling = None
        self._watched = None
        self._streamed = None
        self._outside = None
        self._grammars = None


def _column(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)[:, None]


def _runs(marks: list[tuple[int, PolicyVersion]], length: int) -> VersionRuns:
    """Marks as runs over `length` tokens; marks under which no token was drawn vanish, equal neighbours are one."""
    ends = [start for start, _ in marks[1:]] + [length]
    runs = ((end - start, version) for (start, version), end in zip(marks, ends, strict=True))
    return VersionRuns.merged((length, version) for length, version in runs if length > 0)
