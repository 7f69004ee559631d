"""The ranks of one program on this machine: started by the program itself, watched, and ended together.

Invariants:
- they meet in a file that their user alone can read, and talk over the loopback interface. Nothing listens elsewhere,
  and nothing is unpickled from a peer (both is otherwise with torchrun's stores);
- a rank that fails ends all: at once if a signal killed it, else the others get a moment to log their errors;
- the program ends as its first rank that says more than "a crash", by its exit status or its signal. A crash may be the
  echo of another's end;
- signals that ask for an end go to rank 0, which leads; ranks die with the program, whatever ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.log_format import setup_logging

if TYPE_CHECKING:
    from rollmesh.mesh.config.network import SecuritySection

_log = logging.getLogger(__name__)
# The file in which ranks meet, in the environment of those that were started here.
MEETING = "ROLLMESH_RANKS_MEET_IN"
# Seconds for the last work of a rank after another has ended: to log an error, to leave a process group.
_TOGETHER_S = 10.0
_CRASHED = 1
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def become_ranks(ranks: int) -> None:
    """Starts the present command once for each rank, and ends as they do; returns only in a rank.

    Args:
        ranks: their number; with one, or in a rank that torchrun has started, nothing happens.
    """
    if ranks == 1 or world_size() > 1:
        return
    setup_logging("ranks")
    status = asyncio.run(_run([sys.executable, *sys.orig_argv[1:]], ranks))
    if status < 0:
        # A waiting parent sees the signal itself.
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise SystemExit(status)


def world_size() -> int:
    """Ranks of the program that this process is one of."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def started_here() -> bool:
    """True if this process is a rank that its own program has started."""
    return MEETING in os.environ


def check_ranks(security: SecuritySection) -> None:
    """Refuses ranks that others reach, as torchrun starts them.

    Raises:
        ConfigError: without `security.allow_insecure`.
    """
    if world_size() > 1 and not started_here() and not security.allow_insecure:
        raise ConfigError(
            "refusing to be a rank that torchrun has started: its stores and the ranks' connections know neither "
            "token nor TLS, listen on all addresses, and run what is written to them",
            hint="on one machine set learner.ranks and leave torchrun out; for several, on a network of your own, "
            "security.allow_insecure: true",
        )


def on_loopback() -> dict[str, str]:
    """Variables by which collectives use the loopback interface; without those with which the user chooses another."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: _INTERFACE for name in names if name not in os.environ}


def environment_of(rank: int, ranks: int, meeting: Path) -> Mapping[str, str]:
    """The environment that makes a process a rank.

    Args:
        rank: its number.
        ranks: their number.
        meeting: file in which they meet; there is none yet, in a folder that others cannot read.
    """
    size = str(ranks)
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**numbers, MEETING: str(meeting)}


def status_of(ends: Iterable[int]) -> int:
    """The exit status for ranks that ended so, in that order (a signal's number is negative)."""
    failed = [status for status in ends if status]
    return next((status for status in failed if status != _CRASHED), _CRASHED if failed else 0)


async def _run(command: Sequence[str], ranks: int) -> int:
    with tempfile.TemporaryDirectory(prefix="rollmesh-ranks-") as folder:
        meeting = Path(folder) / "meeting"
        processes = [
            await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                env={**os.environ, **environment_of(rank, ranks, meeting)},
                # A Ctrl-C in the terminal reaches this process alone, which tells rank 0 once.
                process_group=0,
            )
            for rank in range(ranks)
        ]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _send_signal, processes[0], number)
        try:
            return status_of(await _wait_for_ends(processes))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            # The next program finds the devices' memory free.
            await asyncio.gather(*(process.wait() for process in processes))


async def _wait_for_ends(processes: Sequence[asyncio.subprocess.Process]) -> list[int]:
    """Statuses of the ranks that ended by themselves, in that order; returns when no other is worth waiting for."""
    loop = asyncio.get_running_loop()
    waits = {asyncio.create_task(process.wait()): rank for rank, process in enumerate(processes)}
    left, ends = set(waits), list[int]()
    until: float | None = None
    while left:
        within_s = None if until is None else max(0.0, until - loop.time())
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        ended = sorted((waits[wait], wait.result()) for wait in done)
        ends += [status for _, status in ended]
        for rank, status in ended:
            if status:
                _log.warning("rank %d has ended with status %d", rank, status)
        if left and (not done or any(_killed(status) for _, status in ended)):
            _log.warning("killing ranks %s", sorted(waits[wait] for wait in left))
            break
        if until is None and any(rank == 0 or status for rank, status in ended):
            until = loop.time() + _TOGETHER_S
    return ends


def _killed(status: int) -> bool:
    """True if a signal has ended the process, also by way of its own handler."""
    return status < 0 or status > 128


def _send_signal(leader: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        leader.send_signal(number)
