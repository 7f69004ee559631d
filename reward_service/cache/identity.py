"""The identity of a function in the cache: all on which its scores depend besides the item.

Scores of a function are kept if equal items get equal ones: the function declares that (`deterministic`), or its user
does (`reward.cache.functions`). It also needs a version. Scorers of the package have one, a file of the user's has its
contents, and an object its `cache_version`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.trajectory.content_key import digest
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.function_kind import FunctionKind
from rollmesh.reward_service.function_spec import FunctionSpec, label_of
from rollmesh.reward_service.loading import is_path, split_arguments
from rollmesh.reward_service.scorers import takes_option
from rollmesh.reward_service.scorers.versions import versions_with_packages

_SCORER, _SCORE = b"rollmesh scorer1", b"rollmesh score 1"


@dataclass(frozen=True, slots=True)
class _File:
    """A file on which scores depend, as it was read.

    Attributes:
        digest: of its contents.
        state: what changes when it is written.
    """

    path: Path
    digest: bytes
    state: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> _File:
        """Reads a file.

        Raises:
            OSError: it cannot be read.
        """
        state = _state(path)
        return cls(path, hashlib.sha256(path.read_bytes()).digest(), state)

    @property
    def is_unchanged(self) -> bool:
        """True if it still is what was read."""
        try:
            return _state(self.path) == self.state
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Identity:
    """See above.

    Attributes:
        names: under which the user may call the function deterministic.
        scorer: digest of name, version and options.
        sees_all: the function may look at more of an item than its texts: spans, the reason of its end, and
            what it wants.
        file: on which scores depend.
    """

    names: tuple[str, ...]
    scorer: bytes
    sees_all: bool = False
    file: _File | None = None

    def covers(self, kind: FunctionKind, named: Collection[str]) -> bool:
        """True if scores of the function are kept.

        Args:
            kind: its own description.
            named: functions that the user calls deterministic.
        """
        if kind.needs_group:
            return False
        # Once its file has changed, workers that start load another function.
        return (kind.deterministic or is_named(self, named)) and (self.file is None or self.file.is_unchanged)

    def key(self, item: reward_pb2.ScoreItem, content: bytes, wants: Collection[str]) -> bytes:
        """The key of an item's score.

        Args:
            content: the item's content key, computed here; never the one that its caller has sent.
            wants: of the function, see `FunctionKind`.
        """
        return digest((self.scorer, content, *(_details(item, wants) if self.sees_all else ())), person=_SCORE)


def is_named(function: FunctionSpec | Identity, named: Collection[str]) -> bool:
    """True if the user calls a function deterministic."""
    names = function.names if isinstance(function, Identity) else _names(function)
    return any(name in named for name in names)


def identity_of(spec: FunctionSpec) -> Identity | str:
    """The identity of a function, or the reason why it has none, in words."""
    names = _names(spec)
    if not isinstance(spec, str):
        version = getattr(spec, "cache_version", None)
        if version is None:
            return "it has no `cache_version`"
        return Identity(names, _scorer(*names, str(version)), sees_all=True)
    location, option = split_arguments(spec)[0].rpartition(":")[0], spec.partition(":")[2]
    if takes_option(spec) or not is_path(spec):
        used = [f"{package} {version}" for package, version in versions_with_packages([spec]).items()]
        return _of_file(Path(option), spec, *used) if os.path.isfile(option) else Identity(names, _scorer(spec, *used))
    if not location.endswith(".py"):
        return "only functions in a file of their own, FILE.py:FUNCTION, have a version"
    return _of_file(Path(location), spec, sees_all=True)


def _names(spec: FunctionSpec) -> tuple[str, ...]:
    return (spec,) if isinstance(spec, str) else (label_of(spec),)


def _of_file(path: Path, *words: str, sees_all: bool = False) -> Identity | str:
    try:
        file = _File.read(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return Identity(words[:1], _scorer(*words, file.digest.hex()), sees_all=sees_all, file=file)


def _scorer(*words: str) -> bytes:
    return digest([word.encode() for word in words], person=_SCORER)


def _details(item: reward_pb2.ScoreItem, wants: Collection[str]) -> Iterator[bytes]:
    """Parts of an item that a function may see besides content and origin."""
    seen = reward_pb2.ScoreItem(
        response_ids=item.response_ids if "ids" in wants else (),
        finish_reason=item.finish_reason,
        token_ends=item.token_ends if "offsets" in wants else (),
        spans=item.spans,
        turn_count=item.turn_count,
        turns=item.turns if "turns" in wants else (),
    )
    yield seen.SerializeToString(deterministic=True)


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
