"""A gate before the steps of vLLM's engine cores, which run ahead of the process that drives them.

Without it a response may be over before this process receives its first tokens. Behind it a core takes so many steps,
and then answers calls alone. Both sides map one file, which is named by a variable. The process that cores are forked
from installs it by `gated_cores`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "ROLLMESH_TEST_STEP_GATE"
_OPEN = -1
# For prompts, and for requests that run before the one whose tokens are waited for.
_MORE_STEPS = 8
# Number of the limit, its steps, number of the last limit that a core has seen.
_STATE = struct.Struct("<qqq")
_LIMIT, _SEEN = struct.Struct("<qq"), struct.Struct("<q")
_LOOK_S = 0.002


def create(file: Path) -> None:
    """Makes the file of a gate that is open."""
    file.write_bytes(_STATE.pack(0, _OPEN, 0))


class StepGate:
    """The gate of all engine cores of this process, in the file that the variable names."""

    def __init__(self) -> None:
        self._area = _mapped()

    @contextmanager
    def at_most(self, tokens: int) -> Iterator[None]:
        """Each core takes the steps for so many tokens, and a few more, before the end of this block.

        At least one core has to be at work by then.
        """
        number = _STATE.unpack(self._area)[0] + 1
        _LIMIT.pack_into(self._area, 0, number, tokens + _MORE_STEPS)
        try:
            yield
            assert _STATE.unpack(self._area)[2] == number, "engine cores have no gate"
        finally:
            _LIMIT.pack_into(self._area, 0, number, _OPEN)


def _mapped() -> mmap.mmap:
    with Path(os.environ[FILE]).open("r+b") as opened:
        return mmap.mmap(opened.fileno(), _STATE.size)


def install() -> None:
    """In the process from which engine cores are forked."""
    from vllm.v1.engine.core import EngineCoreProc

    area, step = _mapped(), EngineCoreProc._process_engine_step
    seen, taken = 0, 0

    def gated(core: Any) -> bool:
        nonlocal seen, taken
        number, steps, _ = _STATE.unpack(area)
        if number != seen:
            seen, taken = number, 0
        if steps == _OPEN:
            return step(core)
        _SEEN.pack_into(area, _STATE.size - _SEEN.size, number)
        if taken >= steps:
            time.sleep(_LOOK_S)
            return False
        taken += 1
        return step(core)

    EngineCoreProc._process_engine_step = gated
