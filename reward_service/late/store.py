"""The file of late rewards: which item waits for which ticket, and what was delivered. SQLite, on a local disk.

Services and deliverers are different processes that come and go: all that they know of each other is in the file.

Invariants: what `deliver` has returned for is on the disk. The first delivery of a ticket counts. A delivery may come
before its ticket is known. An item keeps its ticket.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.outcomes import REASON_LENGTH

_TABLES = """
CREATE TABLE IF NOT EXISTS waiting (item TEXT PRIMARY KEY, ticket TEXT NOT NULL, since REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS delivered (ticket TEXT PRIMARY KEY, total REAL, components TEXT NOT NULL, reason TEXT NOT
NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tickets ON waiting (ticket);
"""
# Seconds that a process waits for another's write, which takes a few milliseconds.
_LOCK_S = 5.0
_KEPT_S = 7 * 86400.0


class LateStoreError(RewardError):
    """The file cannot be read or written."""

    code = "late_store"


class Arrival(StrEnum):
    """The fate of a delivery.

    Attributes:
        DELIVERED: a response waits for it.
        EARLY: it is kept, and no response has its ticket yet.
        BEFORE: another one came before, and counts.
    """

    DELIVERED = "delivered"
    EARLY = "early"
    BEFORE = "before"


@dataclass(frozen=True, slots=True)
class Delivery:
    """A reward that has come.

    Attributes:
        total: finite; None: the item is unscorable.
        components: named parts, finite.
        reason: why it is unscorable.
    """

    total: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An item's ticket.

    Attributes:
        ticket: as the function gave it.
        since: Unix time at which it did.
        delivery: None: nothing has come yet.
    """

    ticket: str
    since: float
    delivery: Delivery | None


class LateStore:
    """The file, opened by a process that scores. Every method takes milliseconds at most, unless the disk is slow.

    Args:
        path: of the file; made where it is not there.

    Raises:
        LateStoreError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened(path)
            oldest = time.time() - _KEPT_S
            with self._file:
                self._file.execute("DELETE FROM delivered WHERE at < ?", (oldest,))
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from error

    def waiting(self, items: Iterable[str]) -> dict[str, Waiting]:
        """Those of some items that have a ticket, with what was delivered for it.

        Raises:
            LateStoreError: the file cannot be read.
        """
        asked = json.dumps(list(items))
        try:
            rows = self._file.execute(
                "SELECT w.item, w.ticket, w.since, d.ticket IS NOT NULL, d.total, d.components, d.reason "
                "FROM json_each(?) AS asked JOIN waiting AS w ON w.item = asked.value "
                "LEFT JOIN delivered AS d ON d.ticket = w.ticket",
                (asked,),
            ).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from error
        return {
            item: Waiting(ticket, since, Delivery(total, json.loads(components), reason) if there else None)
            for item, ticket, since, there, total, components, reason in rows
        }

    def add(self, item: str, ticket: str) -> Waiting:
        """Notes the ticket of an item, and returns the one that it has.

        Raises:
            LateStoreError: the file cannot be written.
        """
        try:
            with self._file:
                self._file.execute("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?)", (item, ticket, time.time()))
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from error
        return self.waiting([item])[item]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def deliver(store: Path | str, ticket: str, delivery: Delivery | float) -> Arrival:
    """Brings the reward for a ticket; from any process on the store's host.

    Args:
        store: `reward.late.store` of the run.
        ticket: as the reward function gave it.
        delivery: the reward, or its total alone.

    Returns:
        its fate. A mistyped ticket is `EARLY` for ever.

    Raises:
        PayloadError: it is not finite, or the ticket is empty or longer than `REASON_LENGTH`.
        LateStoreError: the file cannot be written.
    """
    found = delivery if isinstance(delivery, Delivery) else Delivery(float(delivery))
    numbers = [*found.components.values(), *(() if found.total is None else (found.total,))]
    if not all(map(math.isfinite, numbers)):
        raise PayloadError("delivery", f"not finite: {numbers}")
    if not 0 < len(ticket) <= REASON_LENGTH:
        raise PayloadError("ticket", f"it is empty, or longer than {REASON_LENGTH} characters")
    path = Path(store)
    row = (ticket, found.total, json.dumps(dict(found.components)), found.reason[:REASON_LENGTH], time.time())
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is no folder")
        with closing(_opened(path)) as file, file:
            if file.execute("INSERT OR IGNORE INTO delivered VALUES (?, ?, ?, ?, ?)", row).rowcount == 0:
                return Arrival.BEFORE
            known = file.execute("SELECT 1 FROM waiting WHERE ticket = ? LIMIT 1", (ticket,)).fetchone()
            return Arrival.EARLY if known is None else Arrival.DELIVERED
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error


def _opened(path: Path) -> sqlite3.Connection:
    """A connection; the file is closed to other users, for rewards decide what is learned."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # Calls come from one thread at a time, which need not be the one that opens.
    file = sqlite3.connect(path, timeout=_LOCK_S, check_same_thread=False)
    file.execute("PRAGMA journal_mode=WAL")
    file.execute("PRAGMA synchronous=FULL")
    file.executescript(_TABLES)
    return file


def _unusable(path: Path, error: Exception) -> LateStoreError:
    return LateStoreError(
        f"the store of late rewards {path} cannot be used: {error}", hint="reward.late.store needs a local disk"
    )
