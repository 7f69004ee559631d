"""The board on which ranks say that they are there, and in which phase: one record for each, replaced as a whole."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BOARD = "board"
"""Name of the file, next to the one in which ranks meet."""
# Bytes of a record in a file. Texts are cut, so that it holds them even where JSON escapes every character.
_RECORD_BYTES = 8192
_TEXT_LENGTH = 600


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank, as it has last said.

    Attributes:
        host, pid: where it runs.
        beat: a number that grows while its interpreter runs.
        phase: what its main thread does.
        phase_s: seconds for which it does.
        failed: the error by which its work has ended; empty: none has.
        echo: that error only says that others did not take part.
        cause: of rank 0 alone: why all ranks end.
        status: the exit status that goes with it.
    """

    host: str
    pid: int
    beat: int = 0
    phase: str = "starting"
    phase_s: float = 0.0
    failed: str = ""
    echo: bool = False
    cause: str = ""
    status: int = 0

    @classmethod
    def of_this_process(cls) -> RankState:
        """The first state of the present process."""
        return cls(socket.gethostname(), os.getpid())

    def encode(self) -> bytes:
        """The state as JSON."""
        values = dataclasses.asdict(self)
        texts = {name: text[:_TEXT_LENGTH] for name, text in values.items() if isinstance(text, str)}
        return json.dumps(values | texts, ensure_ascii=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankState | None:
        """A state from bytes; None for other bytes, such as half-written ones."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def describe(self, rank: int) -> str:
        """The rank in words, with its place and its last phase."""
        return f"rank {rank} (process {self.pid} on {self.host}, {self.phase} for {self.phase_s:.0f} s)"


class RankBoard(Protocol):
    """The place where states are written and read; each call is short."""

    def write(self, rank: int, state: RankState) -> None:
        """Replaces a rank's state.

        Raises:
            OSError: the board is not reached.
        """
        ...

    def read(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states of those ranks that have written any.

        Raises:
            OSError: the board is not reached.
        """
        ...


class FileBoard:
    """A board in a file, for the ranks of one machine.

    Args:
        path: in a folder that others cannot read; made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, rank: int, state: RankState) -> None:
        """See RankBoard."""
        os.pwrite(self._file, state.encode().ljust(_RECORD_BYTES), rank * _RECORD_BYTES)

    def read(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """See RankBoard."""
        found = {rank: RankState.decode(os.pread(self._file, _RECORD_BYTES, rank * _RECORD_BYTES)) for rank in ranks}
        return {rank: state for rank, state in found.items() if state is not None}

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
