"""Policy versions and the runs in which a trajectory stores them.

A trajectory stamps every sampled token with the version that produced it. Stamps change rarely, so they are
kept as runs (length, incarnation, version); `VersionRuns` is that run-length code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import trajectory_pb2

# The largest version and incarnation: far beyond any run, and exact wherever numbers are doubles (Redis' scripts).
MAX_VERSION = 2**31 - 1
_RUN = struct.Struct("<III")


def checked_version(field: str, value: int) -> int:
    """A version or incarnation from outside.

    Raises:
        PayloadError: it is over `MAX_VERSION`.
    """
    if not 0 <= value <= MAX_VERSION:
        raise PayloadError(field, f"{value} is not a version: at most {MAX_VERSION}")
    return value


class PolicyVersion(NamedTuple):
    """Names a set of weights: `incarnation` of the learner (fencing token) and `version` (published steps).

    A tuple, because every run of every payload makes, compares and hashes one.
    """

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str`."""
        left, right = text.split(":")
        return cls(int(left), int(right))

    @classmethod
    def from_proto(cls, message: trajectory_pb2.PolicyVersion) -> PolicyVersion:
        return cls(message.incarnation, message.version)

    def to_proto(self) -> trajectory_pb2.PolicyVersion:
        return trajectory_pb2.PolicyVersion(incarnation=self.incarnation, version=self.version)


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """Per-token versions as runs: ((length, PolicyVersion), ...), lengths >= 1, neighbours different."""

    runs: tuple[tuple[int, PolicyVersion], ...]

    @classmethod
    def merged(cls, runs: Iterable[tuple[int, PolicyVersion]]) -> VersionRuns:
        """Runs of (length, version) in order, with neighbours of one version as one run."""
        merged: list[tuple[int, PolicyVersion]] = []
        for length, version in runs:
            if merged and merged[-1][1] == version:
                merged[-1] = (merged[-1][0] + length, version)
            else:
                merged.append((length, version))
        return cls(tuple(merged))

    @classmethod
    def from_wire(cls, wire: Any, tokens: int) -> VersionRuns:
        """Inverse of `to_wire`; the runs cover `tokens`.

        Raises:
            PayloadError: it is not bytes of whole runs that cover the tokens, or names a version that no run reaches.
        """
        runs: list[tuple[int, PolicyVersion]] = []
        covered = 0
        try:
            for length, incarnation, version in _RUN.iter_unpack(wire):
                if not length or incarnation > MAX_VERSION or version > MAX_VERSION:
                    raise PayloadError(f"versions[{len(runs)}]", f"{length} tokens of version {incarnation}:{version}")
                runs.append((length, PolicyVersion(incarnation, version)))
                covered += length
        except (TypeError, struct.error) as error:
            raise PayloadError("versions", f"expected runs of three uint32: {error}") from error
        if covered != tokens:
            raise PayloadError("versions", f"runs cover {covered} of {tokens} response tokens")
        return cls(tuple(runs))

    def to_wire(self) -> bytes:
        """Runs as little-endian uint32 triples (length, incarnation, version).

        Raises:
            PayloadError: a number is not a uint32.
        """
        try:
            return b"".join([_RUN.pack(length, *version) for length, version in self.runs])
        except struct.error as error:
            raise PayloadError("versions", f"not runs of three uint32: {error}") from error

    def part(self, start: int, stop: int) -> VersionRuns:
        """The runs over tokens `start` to `stop`."""
        runs: list[tuple[int, PolicyVersion]] = []
        begin = 0
        for length, version in self.runs:
            inside = min(begin + length, stop) - max(begin, start)
            if inside > 0:
                runs.append((inside, version))
            begin += length
        return VersionRuns(tuple(runs))

    def to_lists(self) -> list[list[int]]:
        """[[length, incarnation, version], ...], for a reader."""
        return [[length, v.incarnation, v.version] for length, v in self.runs]

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The versions of the runs, one per run."""
        return tuple([version for _, version in self.runs])

    def __len__(self) -> int:
        """Number of tokens."""
        return sum([length for length, _ in self.runs])

    def __iter__(self) -> Iterator[PolicyVersion]:
        """Iterates over the versions, one per token."""
        for length, version in self.runs:
            for _ in range(length):
                yield version

    @property
    def oldest(self) -> PolicyVersion:
        """The version with the smallest version number: the trajectory's staleness counts from it."""
        if len(self.runs) == 1:
            return self.runs[0][1]
        return min([v for _, v in self.runs], key=lambda v: (v.version, v.incarnation))

    @property
    def newest(self) -> PolicyVersion:
        if len(self.runs) == 1:
            return self.runs[0][1]
        return max([v for _, v in self.runs], key=lambda v: (v.incarnation, v.version))
