"""Watches the ranks from each of them, so that one that dies or hangs ends all, by name and in time.

Invariants:
- a rank beats in a thread of its own: it is heard as long as its interpreter runs, whatever its main thread does;
- rank 0 watches all, the others watch rank 0. A rank that is silent for longer than the bound ends the process of its
  watcher, which may wait for it in C++;
- a collective that fails ends the rank's work with a `RankLostError`. Rank 0 names the cause, and the others repeat it;
- the cause is logged as an error by one rank: rank 0, or each rank that hears nothing of it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from rollmesh.learner.liveness.lost_ranks import SilenceTimer, all_explained, describe_cause, describe_silent
from rollmesh.mesh.errors import RankLostError
from rollmesh.mesh.runtime.rank_board import RankBoard, RankState

log = logging.getLogger(__name__)
_BEAT_S = 1.0
# After a failure: a rank without a new beat for this long is gone, and others get this long to say how they ended.
_GONE_S = 5.0
_EXPLAIN_S = 10.0
# More, so that rank 0 has spoken before the others give up.
_HEAR_S = 14.0
# Messages of gloo, of NCCL, and of the stores that ranks meet in.
_COLLECTIVE = re.compile(
    r"gloo|NCCL|nccl|c10d|TCPStore|FileStore|Dist\w*Error|Wait timeout|Timeout waiting for key"
    r"|Connection (closed|reset) by peer|Broken pipe"
)
_HINT = "the launcher starts the learner again, from its last checkpoint; docs/operations.md has more on ranks"


@dataclass(frozen=True, slots=True)
class RankId:
    """This process among the ranks.

    Attributes:
        rank, ranks: its number, and how many there are.
    """

    rank: int
    ranks: int


class RankWatch:
    """The watch of one rank; with one rank alone nothing is watched.

    Args:
        board: of all ranks; None: there are no others.
        rank_id: of this one.
        silent_s: a rank that is not heard for longer ends the others.
        end: ends this process at once with an exit status.
    """

    def __init__(
        self, board: RankBoard | None, rank_id: RankId, *, silent_s: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self._board = board
        self._id = rank_id
        self._silent_s = silent_s
        self._beat_s = min(_BEAT_S, silent_s / 5)
        self._end = end
        self._silence = SilenceTimer(rank_id.ranks)
        self._lock = threading.Lock()
        self._state = RankState.of_this_process()
        self._phase_since = time.monotonic()
        # Set by the main thread when its collective has failed, and answered by the watching one, which may be stuck.
        self._failed_s: float | None = None
        self._explained: Future[RankLostError] = Future()
        self._wake = threading.Event()
        self._beaten = threading.Condition()
        self._beats = 0
        self._closed = threading.Event()
        if board is not None:
            # Others find this rank as soon as it has a watch.
            board.write(rank_id.rank, self._state)
            threading.Thread(target=self._watch, args=(board,), name="rank watch", daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names the work of the main thread; a collective that fails in it becomes an error that names its cause.

        Raises:
            RankLostError: a rank has not taken part.
        """
        self._phase_since = time.monotonic()
        self._change(phase=name, failed="", echo=False)
        try:
            yield
        except RankLostError:
            raise  # of a phase within this one
        except Exception as error:
            echo = is_collective_failure(error)
            first_line = (str(error).splitlines() or [""])[0]
            self._change(failed=f"{type(error).__name__}: {first_line}", echo=echo)
            if self._board is None:
                raise
            if not echo:
                self._wait_for_beat()
                raise
            raise self._explain() from error
        self._phase_since = time.monotonic()
        self._change(phase="between orders")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Ends the watch. Where rank 0 leaves by an error, the others hear of it first."""
        if error is not None and self._board is not None and self._id.rank == 0:
            self._change(cause=str(error) or type(error).__name__, status=getattr(error, "exit_code", 1))
            # Where the others' store is gone, the error by which this rank ends is still its own.
            with suppress(OSError):
                self._board.write(0, self._state)
                time.sleep(2 * self._beat_s)
        self._closed.set()
        self._wake.set()

    def _change(self, **values: object) -> None:
        with self._lock:
            self._state = dataclasses.replace(self._state, **values)  # type: ignore[arg-type]  # of its own fields
        self._wake.set()

    def _wait_for_beat(self) -> None:
        """Waits until the watching thread has written the present state: the process may end next."""
        with self._beaten:
            # The beat that is under way may have begun before.
            due = self._beats + 2
            self._wake.set()
            self._beaten.wait_for(lambda: self._beats >= due, _GONE_S)

    def _explain(self) -> RankLostError:
        """The cause of a failed collective; waits until it is known."""
        self._failed_s = time.monotonic()
        self._wake.set()
        try:
            return self._explained.result(_HEAR_S + _GONE_S)
        except TimeoutError:
            return RankLostError(f"rank 0 does not answer: {self._state.failed}", hint=_HINT)

    def _watch(self, board: RankBoard) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._beat_s)
            self._wake.clear()
            try:
                self._beat(board)
                error = self._judge(board)
            except OSError as gone:
                # Where the run has ended, rank 0 may be the first to leave.
                if self._closed.wait(_GONE_S):
                    return
                error = RankLostError(f"rank 0 is gone, and the ranks' store with it: {gone}", hint=_HINT)
            if error is not None and not self._closed.is_set():
                self._conclude(error)
                return

    def _beat(self, board: RankBoard) -> None:
        with self._lock:
            phase_s = time.monotonic() - self._phase_since
            self._state = state = dataclasses.replace(self._state, beat=self._state.beat + 1, phase_s=phase_s)
        board.write(self._id.rank, state)
        with self._beaten:
            self._beats += 1
            self._beaten.notify_all()

    def _judge(self, board: RankBoard) -> RankLostError | None:
        """The error by which this rank has to end, once there is one."""
        leads, failed_s, ranks = self._id.rank == 0, self._failed_s, self._id.ranks
        others = [rank for rank in range(ranks) if rank != self._id.rank]
        now = time.monotonic()
        seen = board.read(others if leads or failed_s is not None else [0])
        self._silence.observe(now, seen)
        if not leads and 0 in seen and seen[0].cause:
            return RankLostError(seen[0].cause, heard=seen[0].status)
        if failed_s is None:
            cause = describe_silent(seen, self._silence, self._silent_s)
        else:
            # Rank 0 speaks for all, unless it is the one that is lost.
            speaks = leads or self._silence.of(0) > _GONE_S
            complete = speaks and all_explained(seen, self._silence, _GONE_S, len(others))
            if not complete and now - failed_s < (_EXPLAIN_S if leads else _HEAR_S):
                return None
            cause = describe_cause(seen, self._silence, _GONE_S, others)
            cause = cause or f"the ranks have lost one another: {self._state.failed}"
        if not cause:
            return None
        if leads:
            self._change(cause=cause, status=RankLostError.exit_code)
            board.write(0, self._state)
        return RankLostError(cause, hint=_HINT)

    def _conclude(self, error: RankLostError) -> None:
        if self._failed_s is not None:
            self._explained.set_result(error)
            return
        log_lost(error)
        self._end(error.status)


def is_collective_failure(error: BaseException) -> bool:
    """True for an error that reports only a rank that did not take part."""
    return isinstance(error, RuntimeError) and bool(_COLLECTIVE.search(f"{type(error).__name__} {error}"))


def log_lost(error: RankLostError) -> None:
    """Logs the end of a rank: as an error where no other rank does."""
    if error.heard is None:
        log.error("%s", error, extra={"code": error.code})
    else:
        log.warning("ends with rank 0, whose log names the cause")
