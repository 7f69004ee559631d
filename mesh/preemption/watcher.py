"""The watch for a notice, which asks again and again, and a service that ends in order at one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.preemption.notice import Notice
from rollmesh.mesh.preemption.sources import NoticeSource
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.runtime.service import Shutdown

log = logging.getLogger(__name__)
# Seconds between two questions. The shortest notice is of 30 s; a question stays on this machine and costs nothing.
_EVERY_S = 2.0


async def watch_for_notice(
    source: NoticeSource, on_notice: Callable[[Notice], None], *, every_s: float = _EVERY_S
) -> None:
    """Asks until there is a notice, hands it over, and ends.

    A source that does not answer is asked further: one line says so, and another one that it answers again.

    Args:
        source: to ask.
        on_notice: called once.
        every_s: seconds between two questions.
    """
    silent = False
    while True:
        try:
            notice = await source.ask()
        except UnreachableError as error:
            if not silent:
                log.warning("notices of this machine's end are not seen: %s", error)
            silent = True
        else:
            if silent:
                log.info("notices of this machine's end are seen again")
            silent = False
            if notice is not None:
                log.warning("%s; %.0f s are left", notice.reason, notice.within_s)
                on_notice(notice)
                return
        await asyncio.sleep(every_s)


@asynccontextmanager
async def shutdown_at_notice(source: NoticeSource | None, shutdown: Shutdown) -> AsyncIterator[None]:
    """Requests the shutdown at a notice that comes during the block, with the time that is left.

    Args:
        source: to ask; None: there are no notices.
        shutdown: of the service.
    """
    tasks = BackgroundTasks(log_errors(log))
    if source is not None:
        tasks.spawn(watch_for_notice(source, lambda notice: shutdown.request(notice.reason, notice.within_s)))
    try:
        yield
    finally:
        await tasks.close()
