"""Parts that trials of deployments share: hosts that are network namespaces, and daemons that end with a trial."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil

DEADLINE_S = 600.0
_LOOK_S = 1.0


class Daemons:
    """Programs that run until the trial is over, each with a log of its own; ended in the opposite order.

    Args:
        folder: for their logs.
        environment: of all.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.at_end = ExitStack()
        self._environment = dict(environment)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts one."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.at_end.callback(_end, process)
        return process

    def add_host(self, name: str) -> None:
        """A network namespace, until the trial is over."""
        ip("netns", "add", name)
        self.at_end.callback(ip, "netns", "delete", name)
        ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Ends all that was started."""
        self.at_end.close()


def inside(host: str, hosts_file: Path) -> tuple[str, ...]:
    """A command's beginning that runs it on a host: in its network, under its name, with the names of all."""
    enter = f'hostname {host}; mount --bind {hosts_file} /etc/hosts; exec "$0" "$@"'
    return ("nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount", "sh", "-c", enter)


def ip(*arguments: str) -> None:
    """Calls `ip`."""
    subprocess.run(["ip", *arguments], check=True, timeout=60)


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Looks again and again: other programs' states give no events.

    Raises:
        TimeoutError: it did not come.
    """
    until = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {DEADLINE_S:.0f} s")
        time.sleep(_LOOK_S)


def balance(ledger: str) -> str:
    """One line for each table of what `rollmesh ledger` has printed: its largest numbers, and its verdict."""
    said = []
    for table in ledger.split("table ")[1:]:
        name, *lines = table.splitlines()
        counts = dict(line.split() for line in lines if len(line.split()) == 2)
        numbers = ", ".join(f"{counts[key]} {key}" for key in ("admitted", "trained", "readmissions"))
        said.append(f"ledger of {name}: {numbers}, {lines[-1].strip()}")
    return "\n".join(said)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a daemon with all that it has started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for left in alive:
        left.kill()
    process.wait()
