"""`python -m tests.faults.namespace NAME ARGUMENT...`: `rollmesh` in a network namespace of `ip netns`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000


def arguments_in(namespace: str, command: Sequence[str]) -> dict[str, Any]:
    """Options of `tests.warm.popen`.

    Args:
        namespace: in which the command runs; empty: here.
        command: arguments of `rollmesh`.
    """
    return {"arguments": [namespace, *command], "module": __name__} if namespace else {"arguments": command}


def _enter(name: str) -> None:
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


if __name__ == "__main__":
    from rollmesh.cli.app import main

    _enter(sys.argv.pop(1))
    sys.orig_argv = [os.fspath(sys.executable), "-m", "rollmesh.cli", *sys.argv[1:]]
    main()
