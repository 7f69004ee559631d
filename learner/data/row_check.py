"""All rows of a start, looked at once, in a thread, next to all else that a start does.

Every row's fields are checked. The first rows are also made into what they are read for, template and tokens included.
So a row that cannot be used ends a run before anything is trained. A large file does not delay the loading of the
model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from rollmesh.learner.data.dataset import open_rows
from rollmesh.learner.data.records import FileRows, RowForm
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import StuckError

log = logging.getLogger(__name__)
# Rows are a source's first ones; those of most fine-tunings are all among them, and take a second or two.
MADE_ROWS = 2000
_CHUNK = 64
_EVERY_S = 10.0
# No row takes so long; disks and network shares may.
_STUCK_S = 600.0


class RowCheck:
    """Begins to look at the rows of some sources.

    Args:
        sources: with the form of their rows.
        made: rows of each source, the first ones, of which examples are made.
    """

    def __init__(self, sources: Sequence[tuple[DataSource, RowForm[Any]]], *, made: int = 0) -> None:
        self._sources = sources
        self._made = made
        self._rows = self._seen = 0
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="row check", daemon=True).start()

    def within(self, seconds: float) -> bool:
        """Wait for a moment, and return whether all rows have been looked at.

        Raises:
            DataError: a row cannot be used; names it.
        """
        over = self._done.wait(seconds)
        if self._error is not None:
            raise self._error
        return over

    def wait(self) -> None:
        """Waits for the last row, and tells how many have been looked at.

        Raises:
            DataError: a row cannot be used; names it.
            StuckError: the rows do not come.
        """
        seen, since = self._seen, time.monotonic()
        while not self.within(_EVERY_S):
            log.info("reads the rows: %d of %d", self._seen, self._rows)
            if self._seen != seen:
                seen, since = self._seen, time.monotonic()
            elif time.monotonic() - since > _STUCK_S:
                raise StuckError(
                    f"no row has been read for {_STUCK_S:.0f} s, after {seen} of {self._rows}",
                    hint="see to the disk that holds data.train",
                )

    def _run(self) -> None:
        try:
            self._look()
        except BaseException as error:  # noqa: BLE001 - it is raised where the rows are waited for
            self._error = error
        finally:
            self._done.set()

    def _look(self) -> None:
        opened = [open_rows(source, form, checked=False) for source, form in self._sources]
        self._rows = sum(map(len, opened))
        before = 0
        for rows in opened:
            for looked_at in rows.check():
                self._seen = before + looked_at
            before = self._seen
        for rows in opened:
            self._make(rows)

    def _make(self, rows: FileRows[Any]) -> None:
        most = min(len(rows), self._made)
        for start in range(0, most, _CHUNK):
            rows.rows(range(start, min(start + _CHUNK, most)))
