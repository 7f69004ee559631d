"""Waits for the ends of processes, whatever their parents, names their signals, and finds processes that they leave.

Invariant: a zombie has ended. Its parent may reap it late, and the first process of many containers never does; so
neither `psutil.Process.is_running` nor its `wait` reports an end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable

import psutil


def survivors(pids: Iterable[int], within_s: float = 0.0) -> set[int]:
    """The processes that have not ended within `within_s`; none is reaped. (On Linux; elsewhere none is waited for.)"""
    if sys.platform != "linux":
        return set(pids)
    until = time.monotonic() + within_s
    left: dict[int, int] = {}
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it is reaped already
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                left[descriptor] = pid
        while left and (ended := poll.poll(max(0.0, until - time.monotonic()) * 1000)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                del left[descriptor]
    return set(left.values())


def signal_name(number: int) -> str:
    """The name of a signal, or its number: only two of the real-time signals have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes that a process and its children have started, in any group; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
