"""Copies of checkpoints are brought up to date in a thread of their own, while training continues.

An update copies the newest checkpoint first, and looks for a newer one after each. One that fails costs nothing but the
copy: the next one replaces it. The thread does not keep a process that ends: an upload that breaks off leaves no
copy.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

from rollmesh.learner.checkpoint.remote_copies import CopyError, RemoteCopies, RemovedMeanwhileError

log = logging.getLogger(__name__)


class CopyThread:
    """Updates the copies of one run.

    Args:
        copies: where they are.
        checkpoints: their folder.
        log: the consumption log.

    Attributes:
        failed: times that the copies could not be brought up to date.
    """

    def __init__(self, copies: RemoteCopies, checkpoints: Path, log: Path) -> None:
        self._copies = copies
        self._checkpoints = checkpoints
        self._log = log
        self._asked: SimpleQueue[Future[None]] = SimpleQueue()
        self.failed = 0
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    @property
    def url(self) -> str:
        """The place of the copies."""
        return self._copies.url

    @property
    def uploading(self) -> str | None:
        """Name of the checkpoint that is being copied, which must stay; None: none is."""
        return self._copies.uploading

    def start(self) -> Future[None]:
        """Has the copies updated; done when they are as the folder is now, or could not be."""
        asked: Future[None] = Future()
        self._asked.put(asked)
        return asked

    def _run(self) -> None:
        while True:
            waiting = [self._asked.get()]
            while not self._asked.empty():
                waiting.append(self._asked.get())
            self._update()
            for asked in waiting:
                asked.set_result(None)

    def _update(self) -> None:
        more = True
        while more:
            try:
                name = self._copies.copy_next(self._checkpoints, self._log)
            except CopyError as error:
                self.failed += 1
                log.warning("%s; tried again with the next checkpoint", error.message)
                more = isinstance(error, RemovedMeanwhileError)
            else:
                more = name is not None
                if name is not None:
                    log.info("copied: %s", name)
