"""Starts SGLang's server so that it forks its processes, and so that a pause costs nothing.

Run as a script by the server's interpreter, with the arguments of `sglang.launch_server`, through SGLang's own registry
of hooks. By itself the server starts each process with a new interpreter. Each of these would import torch and SGLang
again, for ten seconds of processor time.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def _fork(*_: object) -> None:
    """Before the server starts its processes: it has no device yet, and no threads that they would miss."""
    multiprocessing.set_start_method("fork", force=True)


def _await_request(_: None, scheduler: Scheduler) -> None:
    """In each turn of a paused scheduler: it sleeps as an idle one does, until a request comes."""
    scheduler.maybe_sleep_on_idle()


if __name__ == "__main__":
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)
    paused = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(paused, _await_request, HookType.AFTER)
    if "--enable-lora" in sys.argv:
        import unpinned  # type: ignore[import-not-found]  # in the folder of this script

        unpinned.install()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
