"""`summary.json`: how a summary of any kind is kept in its run folder, and how programs read its values."""

from __future__ import annotations

import json
from collections.abc import KeysView
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.run_files import SUMMARY

_Kept = TypeVar("_Kept", bound="SummaryValues")


@dataclass(frozen=True)
class SummaryValues:
    """Base of the summaries: their values by name, as of a mapping (`dict(summary)`)."""

    def to_dict(self) -> dict[str, Any]:
        """All values, as `summary.json` has them."""
        return asdict(self)

    def keys(self) -> KeysView[str]:
        """The names of the values."""
        return self.to_dict().keys()

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]


def keep_summary(folder: Path, summary: SummaryValues) -> None:
    """Writes a summary into its folder, whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    write_atomically(folder / SUMMARY, json.dumps(summary.to_dict(), indent=2) + "\n")


def kept_summary(kind: type[_Kept], folder: Path) -> _Kept:
    """Reads the summary in a folder.

    Args:
        kind: of the summary.
        folder: of the run.

    Raises:
        DataError: no summary, or one of another kind or program.
    """
    path = folder / SUMMARY
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise DataError(f"no summary in {folder}", hint="it is written when the run ends") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
