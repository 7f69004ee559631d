"""The ranks of one program: started by the program itself on each machine, watched, and ended together.

Invariants:
- on one machine they meet in a file that their user alone can read, and talk over the loopback interface. Nothing
  listens elsewhere;
- those of several machines meet at one address of the first, and talk over one interface. Neither asks for credentials;
- a rank that fails ends all: at once if a signal killed it, else the others get a moment to log their errors. Those
  that are stopped get none;
- the program ends as its first rank that says more than "a crash", by its exit status or its signal. A crash may be the
  echo of another's end;
- signals that ask for an end go to rank 0, which leads; ranks die with the program, whatever ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle

from rollmesh.mesh.addresses import split_address
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.process_ends import signal_name
from rollmesh.mesh.liveness.process_state import is_stopped
from rollmesh.mesh.runtime.child_processes import Child
from rollmesh.mesh.runtime.die_with_parent import die_with_parent, end_with
from rollmesh.mesh.runtime.end_signals import end_signals
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess, can_fork_here, has_one_thread, reseed
from rollmesh.mesh.runtime.hosts import interface_to, is_loopback
from rollmesh.mesh.runtime.log_format import setup_logging
from rollmesh.mesh.runtime.rank_board import BOARD, FileBoard
from rollmesh.mesh.runtime.scratch_folder import scratch_folder
from rollmesh.mesh.runtime.threads import thread_environment

if TYPE_CHECKING:
    from rollmesh.mesh.config.learner import DistributedSection
    from rollmesh.mesh.config.network import SecuritySection

log = logging.getLogger(__name__)
# The file in which ranks of one machine meet, in their environment.
MEETING = "ROLLMESH_RANKS_MEET_IN"
# In the environment of those that were started here.
_STARTED_HERE = "ROLLMESH_STARTED_RANK"
_ENDING = (signal.SIGTERM, signal.SIGINT)
# A user's own choice for threads that wait.
_WAITING = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Seconds for the last work of a rank after another has ended: to log an error, to leave a process group.
_TOGETHER_S = 10.0
# Pause between two looks at whether the others can do any.
_LOOK_S = 0.5
_CRASHED = 1
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine among those of the ranks.

    Attributes:
        number, nodes: its own, from 0 on, and how many there are.
        rendezvous: HOST:PORT of node 0 where ranks meet; empty with one node.
    """

    number: int = 0
    nodes: int = 1
    rendezvous: str = ""


def node_of(distributed: DistributedSection, number: int | None) -> Node:
    """This machine's place.

    Args:
        distributed: of the learner.
        number: as the command line says; None: as Slurm says, or 0 where there is one node.

    Raises:
        ConfigError: no one says it, or there is no such node.
    """
    if number is None:
        number = int(os.environ.get("SLURM_NODEID", "-1")) if distributed.nodes > 1 else 0
    if not 0 <= number < distributed.nodes:
        named = f"there is no node {number}" if number >= 0 else "nothing says which node this is"
        raise ConfigError(
            f"learner.distributed.nodes is {distributed.nodes}, and {named}",
            hint="start the learner with --node N on each, N from 0 on; Slurm's SLURM_NODEID is used without it",
        )
    return Node(number, distributed.nodes, distributed.rendezvous or "")


def become_ranks(ranks: int, node: Node = Node(), modules: Sequence[str] = ()) -> None:
    """Starts the ranks of this machine, and ends as they do; returns only in a rank.

    They are forked from this process. If that may lose threads or is impossible, each executes the current command.

    Args:
        ranks: their number on all nodes; with one, or in a rank that another program has started, nothing happens.
        node: this machine.
        modules: that ranks need; they are loaded once.
    """
    if ranks == 1 or world_size() > 1:
        return
    here = ranks // node.nodes
    own = _load(modules)
    with scratch_folder("rollmesh-ranks-") as folder:
        meeting = folder / "meeting"
        environments = [
            {
                **own,
                **(environment_of(place, ranks, meeting) if node.nodes == 1 else environment_on(node, place, ranks)),
                _STARTED_HERE: "1",
            }
            for place in range(here)
        ]
        processes = (_fork if has_one_thread() and can_fork_here() else _execute)(environments)
        if not processes:
            return
        setup_logging("ranks" if node.nodes == 1 else f"ranks of node {node.number}")
        status = asyncio.run(_watch(processes, node.number * here, folder / BOARD))
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
    return _STARTED_HERE in os.environ


def under_torchrun() -> bool:
    """True if the store in which the ranks meet is torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_ranks(security: SecuritySection) -> None:
    """Refuses ranks that others reach, unless that is allowed.

    Raises:
        ConfigError: without `security.allow_insecure`; ranks have no place to meet.
    """
    if world_size() == 1 or MEETING in os.environ:
        return
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT", "").isdecimal():
        raise ConfigError(
            f"this is a rank of {world_size()}, and MASTER_ADDR and MASTER_PORT do not say where they meet",
            hint="set both, the address being one of rank 0's machine; or learner.distributed.rendezvous",
        )
    if security.allow_insecure:
        return
    if under_torchrun():
        raise ConfigError(
            "refusing to be a rank started by torchrun: its stores and the ranks' connections have neither "
            "token nor TLS, listen on all addresses, and run what is written to them",
            hint="set learner.ranks, and learner.distributed.nodes for several machines, and do not use torchrun; or, "
            "on a private network, security.allow_insecure: true",
        )
    if not is_loopback(os.environ["MASTER_ADDR"]):
        raise ConfigError(
            f"refusing to meet other ranks at {os.environ['MASTER_ADDR']}: their connections have neither token nor "
            "TLS, and anyone who reaches them can change the weights",
            hint="on a private network set security.allow_insecure: true",
        )


def on_loopback() -> dict[str, str]:
    """Variables by which collectives use the loopback interface; without those with which the user chooses another."""
    return {name: _INTERFACE for name in _INTERFACE_VARIABLES if name not in os.environ}


def choose_interface(name: str | None) -> None:
    """Has the ranks of several machines talk over one interface; those of one machine use its loopback.

    Args:
        name: of the interface; None: that of the route to the ranks' meeting place.

    Raises:
        ConfigError: this machine has no such interface.
    """
    if world_size() == 1 or MEETING in os.environ:
        return
    host = os.environ["MASTER_ADDR"]
    found = name or (_INTERFACE if is_loopback(host) else interface_to(host))
    known = [known for _, known in socket.if_nameindex()]
    if found not in known:
        raise ConfigError(
            f"{socket.gethostname()} has no network interface {name!r}"
            if name
            else f"{socket.gethostname()} has no route to {host}",
            hint=f"set learner.distributed.interface to one of {', '.join(known)}",
        )
    os.environ.update({group: found for group in _INTERFACE_VARIABLES if name or group not in os.environ})


def environment_on(node: Node, place: int, ranks: int) -> Mapping[str, str]:
    """The environment of a rank of several machines.

    Args:
        node: its machine.
        place: its number there.
        ranks: their number on all nodes.
    """
    here = ranks // node.nodes
    host, port = split_address(node.rendezvous)
    numbers = {"RANK": node.number * here + place, "LOCAL_RANK": place, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def environment_of(rank: int, ranks: int, meeting: Path) -> Mapping[str, str]:
    """The environment that makes a process a rank.

    Args:
        rank: its number.
        ranks: their number.
        meeting: file in which they meet, not made yet, in a folder that others cannot read.
    """
    size = str(ranks)
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**numbers, MEETING: str(meeting)}


def status_of(ends: Iterable[int]) -> int:
    """The exit status for ranks that ended so, in that order (a signal's number is negative)."""
    failed = [status for status in ends if status]
    return next((status for status in failed if status != _CRASHED), _CRASHED if failed else 0)


def _load(modules: Sequence[str]) -> dict[str, str]:
    """Loads modules so that no library starts threads; returns the environment, which is another one from here on."""
    own = dict(os.environ)
    os.environ.update({**thread_environment(1), **{name: own[name] for name in _WAITING if name in own}})
    for name in modules:
        importlib.import_module(name)
    return own


def _fork(environments: Sequence[Mapping[str, str]]) -> list[ForkedProcess]:
    """Forks a rank for each environment; returns nothing in a rank."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    gc.freeze()
    # Until this process passes them on: a rank may run before that.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    # It finds its place by the environment, as long as that is where the kernel has put it.
    title = setproctitle.getproctitle()
    parent, pids = os.getpid(), list[int]()
    for environment in environments:
        pid = os.fork()
        if not pid:
            end_with(parent)
            os.setpgid(0, 0)
            os.environ.clear()
            os.environ.update(environment)
            reseed()
            setproctitle.setproctitle(f"{title} (rank {environment['RANK']})")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            return []
        # A Ctrl-C in the terminal reaches this process alone, which signals rank 0 once.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        pids.append(pid)
    return [ForkedProcess(pid) for pid in pids]


def _execute(environments: Sequence[Mapping[str, str]]) -> list[subprocess.Popen[bytes]]:
    command = die_with_parent([sys.executable, *sys.orig_argv[1:]])
    return [subprocess.Popen(command, env=environment, process_group=0) for environment in environments]


async def _watch(processes: Sequence[ForkedProcess | subprocess.Popen[bytes]], first: int, board: Path) -> int:
    """Waits for the ranks of this machine, the first of which has a number; returns the program's status."""
    ranks = [Child(process) for process in processes]
    loop = asyncio.get_running_loop()
    for number in end_signals():
        loop.add_signal_handler(number, processes[0].send_signal, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        return status_of(await _wait_for_ends(ranks, first, board))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        # The next program finds the devices' memory free.
        await asyncio.gather(*(rank.wait() for rank in ranks))


async def _wait_for_ends(processes: Sequence[Child], first: int, board: Path) -> list[int]:
    """Statuses of the ranks that ended by themselves, in that order; returns when no other is worth waiting for.

    Args:
        processes: of the ranks of this machine.
        first: number of the first one.
        board: file in which they may have said in which phase they are.
    """
    loop = asyncio.get_running_loop()
    waits = {asyncio.create_task(process.wait()): rank for rank, process in enumerate(processes, first)}
    left, ends = set(waits), list[int]()
    until: float | None = None
    while left:
        within_s = None if until is None else min(_LOOK_S, max(0.0, until - loop.time()))
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        ended = sorted((waits[wait], wait.result()) for wait in done)
        ends += [status for _, status in ended]
        for rank, status in ended:
            if status:
                log.warning("%s has ended %s", _describe(rank, board), _manner(status))
        others = [processes[waits[wait] - first].pid for wait in left]
        in_vain = until is not None and not done and (loop.time() >= until or all(map(is_stopped, others)))
        if left and (in_vain or any(_killed(status) for _, status in ended)):
            log.warning("killing ranks %s", sorted(waits[wait] for wait in left))
            break
        if until is None and any(rank == 0 or status for rank, status in ended):
            until = loop.time() + _TOGETHER_S
    return ends


def _describe(rank: int, board: Path) -> str:
    """The rank, with its last phase where it has said one."""
    if not board.exists():
        return f"rank {rank} on {socket.gethostname()}"
    with contextlib.closing(FileBoard(board)) as opened:
        state = opened.read([rank]).get(rank)
    return state.describe(rank) if state is not None else f"rank {rank}"


def _manner(status: int) -> str:
    return f"by {signal_name(-status)}" if status < 0 else f"with status {status}"


def _killed(status: int) -> bool:
    """True if a signal has ended the process, also by way of its own handler."""
    return status < 0 or status > 128
