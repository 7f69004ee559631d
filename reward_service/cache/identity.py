"""The identity of a function in the cache: all on which its scores depend besides the item.

A function has one only if equal items get equal scores from it. Scorers of the package declare that, as far as they
cost more than a look into the cache. Other functions have to be named in `reward.cache.functions`, and have a version:
a file of the user's by its contents, an object by its `cache_version`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.content_key import digest
from rollmesh.reward_service.loading import FunctionSpec, is_path, label_of
from rollmesh.reward_service.scorers import CACHEABLE, takes_option
from rollmesh.reward_service.scorers.graders import versions

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
        scorer: digest of name, version and options.
        sees_all: the function may look at more of an item than its texts: tokens, spans, the reason of its end.
        is_independent: the function is given groups, and scores each item by itself.
        file: on which scores depend.
    """

    scorer: bytes
    sees_all: bool = False
    is_independent: bool = False
    file: _File | None = None

    @property
    def holds(self) -> bool:
        """False once its file has changed: workers that start from then on load another function."""
        return self.file is None or self.file.is_unchanged

    def key(self, item: reward_pb2.ScoreItem, content: bytes) -> bytes:
        """The key of an item's score.

        Args:
            content: the item's content key, computed here; never the one that its caller has sent.
        """
        return digest((self.scorer, content, *(_details(item) if self.sees_all else ())), person=_SCORE)


def identity_of(spec: FunctionSpec, named: Collection[str]) -> Identity | str:
    """The identity of a function, or the reason why it has none, in words; empty where none is expected.

    Args:
        named: functions that the user calls deterministic, `reward.cache.functions`.
    """
    if not isinstance(spec, str):
        if label_of(spec) not in named:
            return ""
        version = getattr(spec, "cache_version", None)
        if version is None:
            return "it has no `cache_version`"
        return Identity(_scorer(label_of(spec), str(version)), sees_all=True, is_independent=True)
    name, _, option = spec.partition(":")
    if name in CACHEABLE and (not option or takes_option(spec)):
        used = [f"{package} {version}" for package, version in versions([spec]).items()]
        return _with_file(Path(option), spec, *used) if os.path.isfile(option) else Identity(_scorer(spec, *used))
    if spec not in named:
        return ""
    location = spec.rpartition(":")[0]
    if not (is_path(spec) and location.endswith(".py")):
        return "only functions in a file of their own, FILE.py:FUNCTION, have a version"
    return _with_file(Path(location), spec, sees_all=True)


def _with_file(path: Path, *words: str, sees_all: bool = False) -> Identity | str:
    try:
        file = _File.read(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return Identity(_scorer(*words, file.digest.hex()), sees_all=sees_all, file=file)


def _scorer(*words: str) -> bytes:
    return digest([word.encode() for word in words], person=_SCORER)


def _details(item: reward_pb2.ScoreItem) -> Iterator[bytes]:
    """What a function may see of an item besides its content and its origin."""
    seen = reward_pb2.ScoreItem(
        response_ids=item.response_ids,
        finish_reason=item.finish_reason,
        token_ends=item.token_ends,
        spans=item.spans,
    )
    yield seen.SerializeToString(deterministic=True)


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
