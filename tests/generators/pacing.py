"""Bounds how far responses of `hf` engines grow, so that what a test does amid them is amid them on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rollmesh.generators.engines.hf.decode_turn import Stepper
from rollmesh.generators.engines.hf.decoder import Step

_LOOK_S = 0.005


class Pace:
    """Engines of this process stand still where all their sequences have so many response tokens.

    Attributes:
        tokens: may be changed at any time; None: without a bound.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None

    def install(self, put: Callable[[type, str, object], object] = setattr) -> None:
        """Puts the bound before each decode step; `put` sets an attribute of a class."""
        turn = Stepper.turn

        def paced(stepper: Stepper, *, pinned_only: bool) -> Step:
            if self._reached(stepper):
                time.sleep(_LOOK_S)
                return Step()
            return turn(stepper, pinned_only=pinned_only)

        put(Stepper, "turn", paced)

    def bound(self) -> int | None:
        """Response tokens at which an engine stands still."""
        return self.tokens

    def _reached(self, stepper: Stepper) -> bool:
        bound, table = self.bound(), stepper._decoder.table
        if bound is None or not table.active or (stepper._waiting and table.free):
            return False
        rows = [row for row, running in enumerate(table.running) if running is not None]
        return int((table.position[rows] + 1 - table.prompt_length[rows]).min()) >= bound


class PaceOfFile(Pace):
    """The same in another process, with the number in a file, or none where it is empty."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def bound(self) -> int | None:
        text = self._file.read_text()
        return int(text) if text else None
