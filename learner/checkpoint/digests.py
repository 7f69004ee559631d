"""Digests of a checkpoint's files: a disk may change the bytes of a file, and torch would load them unseen.

Every rank reads the files that it has written, usually still in memory, and at a resumption its share of all files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.mesh.errors import DataError

DIGESTS_NAME = "digests.json"
"""File that names all others of a checkpoint."""
_DIGESTS = TypeAdapter(dict[str, str])
_PIECE_BYTES = 1 << 20
# The pattern of torch's names for a rank's files.
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def write_digests(ranks: Ranks, folder: Path) -> None:
    """Writes the digests of all files into the folder; collective.

    Raises:
        OSError: a file cannot be read, or the digests not be written, on whichever rank.
    """
    own_digests: dict[str, str] = {}

    def read() -> None:
        for path in _files(folder):
            written = _OF_RANK.fullmatch(path.name)
            if (int(written[1]) if written else 0) == ranks.process:
                own_digests[str(path.relative_to(folder))] = _digest(path)

    def write() -> None:
        (folder / DIGESTS_NAME).write_text(json.dumps(all_digests, indent=1), encoding="utf-8")

    ranks.on_every_rank(read)
    all_digests: dict[str, str] = {}
    for message in ranks.gather_bytes(json.dumps(own_digests).encode()):
        all_digests |= json.loads(message)
    ranks.on_leader(write)


def check_digests(ranks: Ranks, folder: Path) -> None:
    """Reads all files, each rank its share; collective.

    Raises:
        OSError: on every rank, where one holds other bytes than were written, or none; it is named.
    """

    def read() -> None:
        for name, digest in sorted(_read(folder).items())[ranks.process :: ranks.processes]:
            _check(folder, name, digest)

    ranks.on_every_rank(read)


def check_actor_digests(folder: Path) -> None:
    """Reads the actor's files, without other ranks.

    Raises:
        DataError: one of them holds other bytes than were written, or none; it is named.
    """
    try:
        for name, digest in sorted(_read(folder).items()):
            # Other roles have folders of their own.
            if "/" not in name:
                _check(folder, name, digest)
    except OSError as error:
        raise DataError(f"cannot load checkpoint {folder}: {error}", hint="export another checkpoint") from error


def _read(folder: Path) -> dict[str, str]:
    try:
        digests = _DIGESTS.validate_json((folder / DIGESTS_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise OSError(f"{DIGESTS_NAME} is missing or damaged") from error
    # Every checkpoint has one: a list without it would let any file pass.
    if STATE_NAME not in digests:
        raise OSError(f"{DIGESTS_NAME} is damaged: it does not name {STATE_NAME}")
    return digests


def _check(folder: Path, name: str, digest: str) -> None:
    try:
        found = _digest(folder / name)
    except OSError as error:
        raise OSError(f"{name}: {error.strerror}") from error
    if found != digest:
        raise OSError(f"{name} is damaged: its bytes are not those that were written")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
