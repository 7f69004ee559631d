"""A gate before the steps of SGLang's schedulers, which run ahead of the process that drives them.

Without it a response may be over before this process receives its first tokens. It is a plugin of SGLang, and what
`/slow_down` tells is no time but a number: of steps that a scheduler takes. Each request or abort that it is told of
gives it one more. Then it answers calls alone. All ranks see all calls in the same order, hence stop at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# A request that begins, or is to end, takes a step.
_NEWS = ("TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput", "AbortReq")


def add_to(python_path: str, folder: Path) -> str:
    """The PYTHONPATH of a server's processes with this plugin, whose files are written in an empty folder."""
    # Not in the server's processes, which know nothing of Rollmesh.
    from rollmesh.generators.engines.sglang import server_plugins

    server_plugins.write(Path(__file__), folder)
    return f"{folder}:{python_path}".rstrip(":")


@dataclass(slots=True)
class _Gate:
    """The gate of one scheduler.

    Attributes:
        steps: that it may take; None: as many as it has work for.
        taken: of these.
    """

    steps: int | None = None
    taken: int = 0

    def limit(self, _: object, scheduler: Any, *__: object) -> None:
        """Follows `slow_down`, which does not slow down after that."""
        wanted, scheduler.forward_sleep_time = scheduler.forward_sleep_time, None
        self.steps, self.taken = None if wanted is None else int(wanted), 0

    def step(self, *_: object) -> None:
        """Precedes each step."""
        self.taken += 1

    def ingest(self, ingest: Callable[..., list[Any]], scheduler: Any, **how: Any) -> list[Any]:
        """Stands around the look for calls that precedes each step."""
        calls = ingest(scheduler, **how)
        self._hear(calls)
        while self.steps is not None and self.taken >= self.steps and not scheduler._engine_paused:
            scheduler.maybe_sleep_on_idle()
            more = ingest(scheduler, **how)
            self._hear(more)
            calls = [*calls, *more]
        return calls

    def _hear(self, calls: list[Any]) -> None:
        self.taken -= sum(type(call).__name__ in _NEWS for call in calls)


def install() -> None:
    """Called by SGLang in each of a server's processes, before schedulers are made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    gate = _Gate()
    HookRegistry.register(f"{_SCHEDULER}.slow_down", gate.limit, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.run_batch", gate.step, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.ingest_requests", gate.ingest, HookType.AROUND)
