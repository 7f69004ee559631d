"""The tokens of one episode: sampled ones, verbatim, and those between the turns, masked.

Invariants: sampled tokens are appended as they came and never change. A masked token has log-prob 0 and the version of
the token before it (at the very beginning: of the first sampled one). Two turns have masked tokens between them, so
that the turns of a draft are found again from its mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens of one turn, or masked ones.

    Attributes:
        sampled: by the model.
        tokens: of a masked segment their ids alone count.
        begin: index of the first one in the response.
        side: arrays that came with a turn.
    """

    sampled: bool
    tokens: Trajectory
    begin: int
    side: Mapping[str, NDArray[np.generic]]


class Transcript:
    """Grows by turns and by the tokens between them.

    Args:
        prompt_ids: of the member.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.segments: list[Segment] = []
        self.length = 0

    @property
    def turns(self) -> list[Trajectory]:
        """The sampled tokens, by turn."""
        return [segment.tokens for segment in self.segments if segment.sampled]

    @property
    def context(self) -> list[int]:
        """Prompt and response: the prompt of the next turn."""
        ids = list(self.prompt_ids)
        for segment in self.segments:
            ids.extend(segment.tokens.response_ids.tolist())
        return ids

    def add_turn(self, sampled: Trajectory, side: Mapping[str, NDArray[np.generic]] | None = None) -> None:
        """Appends sampled tokens, and the arrays that came with them; does nothing without tokens."""
        if len(sampled):
            self._append(True, sampled, side or {})

    def add_masked(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not sample."""
        if not ids:
            return
        version = next((s.tokens.versions.runs[-1][1] for s in reversed(self.segments) if s.tokens.versions.runs), None)
        runs = VersionRuns(((len(ids), version),) if version is not None else ())
        count = len(ids)
        tokens = Trajectory(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.zeros(count, np.uint8), runs)
        self._append(False, tokens, {})

    def sampled(self, running: Trajectory | None = None) -> Trajectory | None:
        """All tokens, with those of a turn that is being sampled; None before the first sampled one."""
        segments = [(segment.sampled, segment.tokens) for segment in self.segments]
        if running is not None and len(running):
            segments.append((True, running))
        first = next((tokens.versions.runs[0][1] for is_sampled, tokens in segments if is_sampled), None)
        if first is None:
            return None
        return Trajectory(
            response_ids=np.concatenate([tokens.response_ids for _, tokens in segments]).astype(np.int32, copy=False),
            log_probs=np.concatenate([tokens.log_probs for _, tokens in segments]).astype(np.float32, copy=False),
            response_mask=np.concatenate([tokens.response_mask for _, tokens in segments]),
            versions=VersionRuns.merged(run for _, tokens in segments for run in _versions(tokens, first).runs),
        )

    def side(self) -> dict[str, NDArray[np.generic]]:
        """Arrays over prompt and response, a row for each token but the last: a turn's rows are those it came with."""
        turns = [segment for segment in self.segments if segment.sampled]
        if not turns:
            return {}
        whole = {name: array.copy() for name, array in turns[-1].side.items()}
        for segment in turns[:-1]:
            first = len(self.prompt_ids) + segment.begin - 1
            rows = slice(first, first + len(segment.tokens))
            for name, array in whole.items():
                if name in segment.side:
                    array[rows] = segment.side[name][rows]
        return whole

    def _append(self, sampled: bool, tokens: Trajectory, side: Mapping[str, NDArray[np.generic]]) -> None:
        self.segments.append(Segment(sampled, tokens, self.length, side))
        self.length += len(tokens)


def split_segments(draft: Trajectory) -> list[tuple[bool, Trajectory]]:
    """A draft's segments, in order: (whether it was sampled, tokens)."""
    mask = draft.response_mask
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(draft)]
    return [(bool(mask[begin]), draft.part(begin, end)) for begin, end in itertools.pairwise(edges)]


def _versions(tokens: Trajectory, first: PolicyVersion) -> VersionRuns:
    return tokens.versions if tokens.versions.runs else VersionRuns(((len(tokens), first),))
