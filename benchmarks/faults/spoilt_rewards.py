"""Reward functions that break, each for one response in twenty, and the right one for the others.

A response decides for itself, so that each try of it ends alike. Loaded by file path, as a user's would be.
"""

from __future__ import annotations

import ctypes
import os
import signal
import zlib
from typing import Any

ONE_IN = 20


def is_spoilt(response: str) -> bool:
    """True for one response in `ONE_IN`."""
    return zlib.crc32(response.encode()) % ONE_IN == 0


def share_right(response: str, truth: str) -> float:
    """Share of the characters that are right."""
    return sum(a == b for a, b in zip(response.strip(), truth, strict=False)) / max(1, len(truth))


def freezes(solution_str: str, ground_truth: str, **_others: Any) -> float:
    """Keeps the interpreter to itself for an hour."""
    if is_spoilt(solution_str):
        # Through `PyDLL`, which unlike `CDLL` keeps the interpreter's lock.
        ctypes.PyDLL(None).sleep(3600)
    return share_right(solution_str, ground_truth)


def dies(solution_str: str, ground_truth: str, **_others: Any) -> float:
    """Kills its process."""
    if is_spoilt(solution_str):
        os.kill(os.getpid(), signal.SIGKILL)
    return share_right(solution_str, ground_truth)


def right(solution_str: str, ground_truth: str, **_others: Any) -> float:
    """Never breaks."""
    return share_right(solution_str, ground_truth)
